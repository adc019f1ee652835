"""What a mamba-architecture file says about sizes, and the cache it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvnumba.errors import ModelFileError
from kvnumba.recurrent_config import RecurrentConfig
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.keys import Keys

ARCHITECTURE = "mamba"
_NOT_DONE = {
    "expert_count": 0,
    "feed_forward_length": 0,
    "attention.head_count": 0,
    "embedding_scale": 0,
    "final_logit_softcapping": 0,
    "logit_scale": 0,
    "residual_scale": 0,
    "ssm.dt_b_c_rms": False,
    "ssm.group_count": 0,
}
"""Keys that change the arithmetic in ways that this runner does not follow (the normed time steps
of FalconMamba, for one), and the value that does not."""
_SIZES = {"conv_kernel", "inner_size", "state_size", "time_step_rank"}


@dataclass(frozen=True)
class MambaParams:
    """Sizes and constants of a model.

    Attributes
    ----------
    n_layer, n_embd, n_ctx_train : int
    d_inner : int
        Channels of the state space.
    d_state : int
        Values of the state per channel.
    d_conv : int
        Tokens that the convolution sees, at least 2.
    dt_rank : int
        Width that the time steps are projected from.
    eps : float
        Of the RMS norms.
    """

    n_layer: int
    n_embd: int
    d_inner: int
    d_state: int
    d_conv: int
    dt_rank: int
    n_ctx_train: int
    eps: float

    @property
    def n_embd_r(self) -> int:
        """Values of the convolution's state: the inputs of the last ``d_conv - 1`` tokens."""
        return (self.d_conv - 1) * self.d_inner

    @property
    def n_embd_s(self) -> int:
        """Values of the state space's state."""
        return self.d_state * self.d_inner

    def recurrent_config(
        self, n_seq_max: int = 1, n_rewind: int = 0, **options: Any
    ) -> RecurrentConfig:
        """Return the configuration of a cache for this model.

        Parameters
        ----------
        n_seq_max, n_rewind : int
            Sequences, and tokens that each can be taken back by.
        **options
            Further fields of `RecurrentConfig`, such as `type_s` and `n_ubatch`.
        """
        return RecurrentConfig(
            n_layer=self.n_layer,
            n_embd_r=self.n_embd_r,
            n_embd_s=self.n_embd_s,
            n_seq_max=n_seq_max,
            n_rewind=n_rewind,
            **options,
        )


def read_params(file: GGUFFile) -> MambaParams:
    """Read a model's sizes.

    Raises
    ------
    ModelFileError
        If a key is missing, impossible, or asks for something that this runner does not do.
    """
    keys = Keys(file, ARCHITECTURE)
    keys.refuse_what_is_not_done(_NOT_DONE)
    _refuse_unknown_ssm_keys(file)
    d_conv = keys.count("ssm.conv_kernel")
    if d_conv < 2:
        raise keys.fail("ssm.conv_kernel", d_conv, "at least 2 (a state is kept between tokens)")
    return MambaParams(
        n_layer=keys.count("block_count"),
        n_embd=keys.count("embedding_length"),
        d_inner=keys.count("ssm.inner_size"),
        d_state=keys.count("ssm.state_size"),
        d_conv=d_conv,
        dt_rank=keys.count("ssm.time_step_rank"),
        n_ctx_train=keys.count("context_length"),
        eps=keys.number("attention.layer_norm_rms_epsilon"),
    )


def _refuse_unknown_ssm_keys(file: GGUFFile) -> None:
    prefix = f"{ARCHITECTURE}.ssm."
    for key in file.keys:
        known = key in _named(_SIZES) or key.removeprefix(f"{ARCHITECTURE}.") in _NOT_DONE
        if key.startswith(prefix) and not known:
            raise ModelFileError(
                f"{file.path}: the key {key} is not known to this runner, so its results might "
                "be wrong"
            )


def _named(sizes: set[str]) -> set[str]:
    return {f"{ARCHITECTURE}.ssm.{name}" for name in sizes}
