# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A model's own forward, on several inputs at once, with the weights of one layer in memory at a time.

The model is built without memory for its parameters. Every evaluation runs in a thread of its own and stops before each
part of the model (a layer, the embedding, a norm, the head); when all of them have come to the same part, its weights are
read, the evaluations go through it one after another, and the weights are dropped. So each weight is read once for all
inputs, and what is computed is what the model itself computes: nothing of its forward is written here a second time. Only
one thread runs at any time.
"""

import copy
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .experts import apart


Read = Callable[[str], Tensor]
"""A tensor by its key."""

Change = Callable[[Tensor], Tensor]
"""What a tensor is to be replaced by."""


def empty_model(kind: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model whose parameters are on the meta device, and whose buffers, which no checkpoint holds, are computed."""
    with init_empty_weights(include_buffers=False):
        return kind._from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa").eval()


def model_reader(model: PreTrainedModel, read: Read, keys: Collection[str], tied: Mapping[str, str]) -> Read:
    """A function that reads a parameter as the model holds it: in its type, experts fused where the checkpoint holds them
    apart, and of tied ones the one that the checkpoint has.

    Args:
        model: the model.
        read: a tensor of the checkpoint, by the model's key or by that of an expert apart.
        keys: the keys that it knows.
        tied: key → the key that it shares its tensor with.
    """

    def value(key: str) -> Tensor:
        if key not in keys and key in tied:
            return value(tied[key])
        parameter = model.get_parameter(key)
        if key in keys:
            return read(key).to(parameter.dtype)
        fused = torch.empty(parameter.shape, dtype=parameter.dtype)
        for part, view in apart([(key, fused)]):
            view.copy_(read(part))
        return fused

    return value


@torch.no_grad()
def evaluate_layerwise(
    model: PreTrainedModel,
    read: Read,
    computations: Sequence[Callable[[], Any]],
    resident: Iterable[str] = (),
    changes: Mapping[int, Mapping[str, Change]] | None = None,
) -> list[Any]:
    """The result of each computation, every one a function that calls the model. Errors are raised as they are.

    Args:
        model: as `empty_model` gives it; it is empty again afterwards.
        read: a parameter by its key, as the model holds it.
        computations: what to compute.
        resident: parameters that are in memory all the time: those that other layers than their own ask for.
        changes: by a computation's number, parameters that are others for it alone.
    """
    stays = list(resident)
    parts = _parts(model, set(stays))
    evaluations = [_Evaluation(compute) for compute in computations]

    def take_turns(those: list[_Evaluation]) -> None:
        for evaluation in those:
            with _changed(model, (changes or {}).get(evaluations.index(evaluation), {})):
                evaluation.take_turn()

    with _filled(model, read, stays), _stops(parts):
        try:
            for evaluation in evaluations:
                evaluation.start()
            take_turns(evaluations)
            while waiting := [item for item in evaluations if item.waits_for is not None]:
                part = waiting[0].waits_for
                with _filled(model, read, parts[part]):
                    take_turns([item for item in waiting if item.waits_for is part])
        finally:
            for evaluation in evaluations:
                evaluation.cancel()
    return [evaluation.result for evaluation in evaluations]


def _parts(model: PreTrainedModel, resident: set[str]) -> dict[nn.Module, list[str]]:
    """The modules whose weights are in memory together, with the names of their parameters: each layer, and every other
    module that has some of its own."""
    layers = set(model.base_model.layers)
    inside = {module for layer in layers for module in layer.modules()} - layers
    found = {}
    for name, module in model.named_modules():
        if module in inside:
            continue
        own = module.named_parameters(recurse=module in layers, remove_duplicate=False)
        keys = [f"{name}.{key}" if name else key for key, _ in own]
        if keys := [key for key in keys if key not in resident]:
            found[module] = keys
    return found


class _Stopped(BaseException):
    """Ends an evaluation whose result is no longer wanted, because another one failed."""


class _Evaluation(threading.Thread):
    """One evaluation, which runs only while it is its turn.

    Attributes:
        waits_for: the module whose weights it needs to go on; None before it begins and once it has ended.
        result: what it computed.
    """

    def __init__(self, compute: Callable[[], Any]):
        super().__init__(daemon=True)
        self._compute = compute
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._torch_threads = torch.get_num_threads()
        self._cancelled = False
        self._error: BaseException | None = None
        self.waits_for: Any = None
        self.result: Any = None

    def run(self) -> None:
        try:
            self._pause_until_turn()
            # a thread has its own number of them, on which the order of a sum may depend
            torch.set_num_threads(self._torch_threads)
            with torch.no_grad():
                self.result = self._compute()
        except BaseException as error:  # noqa: BLE001  (whatever it is, `take_turn` raises it in the caller's thread)
            self._error = error
        self.waits_for = None
        self._paused.release()

    def _pause_until_turn(self) -> None:
        self._go.acquire()
        if self._cancelled:
            raise _Stopped

    def wait_for(self, module: nn.Module) -> None:
        """Called from inside: pause until the module has its weights."""
        self.waits_for = module
        self._paused.release()
        self._pause_until_turn()

    def take_turn(self) -> None:
        """Run until it waits for a module, or ends."""
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """End it where it is, if it has begun and has not ended."""
        self._cancelled = True
        if self.is_alive():
            self._go.release()
            self.join()


@contextmanager
def _stops(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Let evaluations pause before each of these modules."""

    def stopping(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            evaluation = threading.current_thread()
            assert isinstance(evaluation, _Evaluation)
            evaluation.wait_for(module)
            return forward(*args, **kwargs)

        return call

    modules = list(parts)
    # no hooks: a model whose layers have some computes its reads in another way
    for module in modules:
        module.forward = stopping(module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


@contextmanager
def _filled(model: PreTrainedModel, read: Read, keys: list[str]) -> Iterator[None]:
    """These parameters, in memory."""
    empty = {key: model.get_parameter(key) for key in keys}
    try:
        for key in keys:
            _set(model, key, read(key))
        yield
    finally:
        for key, parameter in empty.items():
            _set(model, key, parameter)


@contextmanager
def _changed(model: PreTrainedModel, changes: Mapping[str, Change]) -> Iterator[None]:
    """Those parameters of `changes` that are in memory, changed."""
    before = {key: model.get_parameter(key) for key in changes}
    before = {key: parameter for key, parameter in before.items() if not parameter.is_meta}
    for key, parameter in before.items():
        _set(model, key, changes[key](parameter.detach()))
    try:
        yield
    finally:
        for key, parameter in before.items():
            _set(model, key, parameter)


def _set(model: PreTrainedModel, key: str, tensor: Tensor) -> None:
    owner, _, name = key.rpartition(".")
    parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
    model.get_submodule(owner)._parameters[name] = parameter
