"""Actions as short canonical sentences. The same action has the same text in every run; only a few words depend on the state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from mtmc_lsp.core.action import ActionKind, MacroAction

STOP_TEXT = "stop, nothing else will pay."
"""The text of STOP."""
MOST_NAMES = 4
"""Most nodes of a region that are named."""
MOST_VALUE_CHARACTERS = 40
"""Maximum length of a parameter's text in the default format."""
BLOCKS = ("rows", "block", "block_m", "block_n", "block_k")
"""Fields of a configuration that make up the tile, in this order."""
NUMBERS = ("warps", "stages")
TILE_AND_SPEED = (*BLOCKS, *NUMBERS, "kind", "order", "group_m")
"""Fields that the text has elsewhere or never."""
VERBS: Mapping[ActionKind, str] = {
    ActionKind.FUSE: "fuse",
    ActionKind.TENSOR_CORE: "use tensor cores for",
    ActionKind.SPLIT: "split the reduction of",
    ActionKind.PARALLEL_SCAN: "scan the iterations of",
    ActionKind.CHUNK_PRODUCTS: "compute chunks of iterations of",
    ActionKind.SIDE_BY_SIDE: "launch together",
    ActionKind.ALGEBRA: "rewrite",
    ActionKind.CHANNELS_LAST: "use channels last for",
    ActionKind.FP16_OPERANDS: "store as fp16 pairs the operands of",
    ActionKind.IM2WIN: "use im2win for",
    ActionKind.LIBRARY: "call the library for",
    ActionKind.RECOMPUTE: "recompute",
    ActionKind.CHUNK_ROWS: "chunk the rows of",
    ActionKind.RECOMPUTE_ATTENTION: "recompute the attention of",
    ActionKind.CUDA_GRAPH: "capture a CUDA graph of",
    ActionKind.AUTOTUNE: "tune",
}
UNTOLD = frozenset({"kernels", "launches", "node", "sites"})
"""Parameters that the region already tells."""


def action_texts(actions: Sequence[MacroAction]) -> list[str]:
    """One sentence per action. Sentences that would be equal get a number, in the order of the actions' keys."""
    return numbered(actions, [action_text(action) for action in actions])


def numbered(actions: Sequence[MacroAction], known: Sequence[str]) -> list[str]:
    """The texts of actions, where equal ones get a number, in the order of the actions' keys."""
    texts = list(known)
    repeated = {text for text, count in Counter(texts).items() if count > 1}
    by_key = sorted(range(len(actions)), key=lambda index: actions[index].key)
    seen: Counter[str] = Counter()
    for index in by_key:
        text = texts[index]
        if text in repeated:
            seen[text] += 1
            texts[index] = f"{text[:-1]} #{seen[text]}."
    return texts


def action_text(action: MacroAction) -> str:
    """``fuse linear, silu, mul_4: matmul 64x32x32 warps 4 stages 3 ieee.``."""
    details = [text for name in sorted(action.params) if (text := _parameter(name, action.params[name]))]
    return f"{VERBS[action.kind]} {region_text(action.region)}{': ' if details else ''}{', '.join(details)}."


def region_text(nodes: Sequence[str]) -> str:
    """``linear, silu, mul_4``; ``pow_1, mean to mul_8 (6)`` for a longer region."""
    if not nodes:
        return "all"
    if len(nodes) <= MOST_NAMES:
        return ", ".join(nodes)
    return f"{nodes[0]}, {nodes[1]} to {nodes[-1]} ({len(nodes)})"


def config_text(config: Mapping[str, object]) -> str:
    """A kernel's configuration: ``tile 8x128 warps 2``. Flags and numbers that are off are left out."""
    words = [str(config["kind"])] if "kind" in config else []
    tile = [str(config[name]) for name in BLOCKS if name in config]
    words += ["x".join(tile)] if tile else []
    words += [f"{name} {config[name]}" for name in NUMBERS if name in config]
    for name, value in config.items():
        if name in TILE_AND_SPEED or _is_off(value):
            continue
        words.append(name if value is True else str(value) if name == "precision" else f"{name} {value}")
    return " ".join(words)


def _is_off(value: object) -> bool:
    """Whether a flag or number has no effect: a split into one part is none."""
    return value is None or value is False or (value in (0, 1) and value is not True)


def _parameter(name: str, value: object) -> str:
    if name in UNTOLD:
        return ""
    if name == "config" and isinstance(value, Mapping):
        return config_text(value)
    if name == "variants" and isinstance(value, (list, tuple)):
        configs = [
            item["config"] for item in value if isinstance(item, Mapping) and isinstance(item.get("config"), Mapping)
        ]
        return f"{len(value)} variants" + (f" from {config_text(configs[0])}" if configs else "")
    if name == "rule":
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return f"{name} {text[:MOST_VALUE_CHARACTERS]}"
