"""Aliases of ATen operators: names with the same overloads for the same operation."""

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
    "arctan2": "atan2",
    "arcsin": "asin",
    "arccos": "acos",
    "arcsinh": "asinh",
    "arccosh": "acosh",
    "arctanh": "atanh",
    "fix": "trunc",
    "ger": "outer",
    "concat": "cat",
    "concatenate": "cat",
    "special_expit": "sigmoid",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_erfinv": "erfinv",
    "special_exp2": "exp2",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "special_round": "round",
    "special_gammaln": "lgamma",
    "special_digamma": "digamma",
    "special_psi": "digamma",
    "special_polygamma": "polygamma",
    "special_i0": "i0",
    "special_logsumexp": "logsumexp",
    "special_softmax": "softmax",
}
"""Alias to the name that lowerings use."""


RECURRENT = "mtmc_recurrent"
"""Namespace of the operators that replace ATen's recurrent layers during a trace."""
SINGLE, ATTENTION = "mtmc_single", "scaled_dot_product_attention"
"""Namespace of the operators that replace ATen's during a trace, and the name of attention's."""


def canonical(op: str) -> str:
    """The operator under its canonical name."""
    namespace, name, overload = op.split(".") if op.count(".") == 2 else ("", op, "")
    if namespace == SINGLE:
        return f"aten.{name}.default"
    if namespace == RECURRENT:
        return f"aten.{name}.input"
    return f"{namespace}.{SYNONYMS[name]}.{overload}" if namespace == "aten" and name in SYNONYMS else op
