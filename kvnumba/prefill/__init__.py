"""What of a prompt need not be computed: a held prefix, chunks that moved, a window that slides on.

Each function plans and changes nothing; the plan says what will be done and why, and its `apply`
does it with the verbs of the memory. Token ``i`` of a sequence is at position ``i`` throughout.

Source: spec/llama_cpp.md 7 (prompt reuse, context shift, cache reuse by shifting).
"""

from kvnumba.prefill.chunks import ChunkPlan, Move, plan_chunk_reuse
from kvnumba.prefill.context_shift import (
    ContextShift,
    must_shift,
    plan_context_shift,
    plan_prompt_cut,
)
from kvnumba.prefill.moving import move_refusal
from kvnumba.prefill.reuse import ReusePlan, plan_reuse

__all__ = [
    "ChunkPlan",
    "ContextShift",
    "Move",
    "ReusePlan",
    "move_refusal",
    "must_shift",
    "plan_chunk_reuse",
    "plan_context_shift",
    "plan_prompt_cut",
    "plan_reuse",
]
