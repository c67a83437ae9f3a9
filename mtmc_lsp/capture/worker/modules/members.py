"""Writes the accesses of modules, parameters, buffers and attributes. Runs in workers."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from mtmc_lsp.capture.accesses import OWN, STORES, is_attribute_name

LISTS = (torch.nn.Sequential, torch.nn.ModuleList)


def access_of(instance: Any, name: str) -> str:
    """Python expression for the name of a module, parameter or buffer: ``layers.0.weight`` is ``self.layers[0].weight``."""
    access, owner = "self", instance
    for part in name.split(".") if name else ():
        access = member_of(access, owner, part)
        owner = owner._modules.get(part) if isinstance(owner, torch.nn.Module) else None
    return access


def member_of(access: str, owner: Any, name: str) -> str:
    """Python expression for an attribute of ``owner``, also if its name is no identifier.

    Args:
        access: Python for the owner.
    """
    if is_attribute_name(name):
        return f"{access}.{name}"
    store = OWN
    if isinstance(owner, torch.nn.Module):
        if _is_list_item(owner, name):
            return f"{access}[{name}]"
        if _is_dictionary_item(owner, name):
            return f"{access}[{name!r}]"
        store = next((store for store in STORES if name in getattr(owner, store)), OWN)
    return f"{access}.{store}[{name!r}]"


def _is_list_item(owner: torch.nn.Module, name: str) -> bool:
    """Whether the name is the position of an item; other modules may have numbers as names, too."""
    if not (name.isascii() and name.isdigit()):
        return False
    position, read = int(name), getattr(type(owner), "__getitem__", None)
    if any(isinstance(owner, kind) and read is kind.__getitem__ for kind in LISTS):
        return next(itertools.islice(owner._modules, position, None), None) == name
    is_list = isinstance(owner, torch.nn.ParameterList) and read is torch.nn.ParameterList.__getitem__
    return is_list and position < len(owner) and name == str(position)


def _is_dictionary_item(owner: torch.nn.Module, name: str) -> bool:
    read = getattr(type(owner), "__getitem__", None)
    if isinstance(owner, torch.nn.ModuleDict):
        return read is torch.nn.ModuleDict.__getitem__ and name in owner._modules
    return isinstance(owner, torch.nn.ParameterDict) and read is torch.nn.ParameterDict.__getitem__ and name in owner
