"""Branches of a sequence: forks for parallel completions, drafts that are accepted or taken back.

What may be refused is asked before anything is changed; then only verbs are called, and none of
them with nothing to do.

Source: spec/llama_cpp.md 7 (parallel completions, speculative rollback).
"""

from kvnumba.branches.drafts import AcceptPlan, Draft, plan_accept
from kvnumba.branches.ends import can_rewind, cut, drop_hidden, parts_of
from kvnumba.branches.forks import ForkPlan, fork, plan_fork

__all__ = [
    "AcceptPlan",
    "Draft",
    "ForkPlan",
    "can_rewind",
    "cut",
    "drop_hidden",
    "fork",
    "parts_of",
    "plan_accept",
    "plan_fork",
]
