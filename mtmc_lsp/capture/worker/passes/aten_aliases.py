"""ATen's second names: operators that PyTorch has under two names, with overloads of the same names."""

from __future__ import annotations

SYNONYMS = {
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "true_divide": "div",
    "absolute": "abs",
    "negative": "neg",
    "clip": "clamp",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "arctan": "atan",
    "concat": "cat",
    "concatenate": "cat",
    "special_expit": "sigmoid",
}
"""A second name to the one that rules know the operation by."""


RECURRENT = "mtmc_recurrent"
"""The namespace of the operators that stand for ATen's recurrent layers while a target is traced."""


def canonical(op: str) -> str:
    """The operator by its first name."""
    namespace, name, overload = op.split(".") if op.count(".") == 2 else ("", op, "")
    if namespace == RECURRENT:
        return f"aten.{name}.input"
    return f"{namespace}.{SYNONYMS[name]}.{overload}" if namespace == "aten" and name in SYNONYMS else op
