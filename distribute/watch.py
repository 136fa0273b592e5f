"""Whether what DDP synchronises is still what is trained.

DDP looks at a module once, when it wraps it, and synchronises the gradients of what runs through
its own forward. What happens beside that goes wrong without a word: ranks whose gradients were not
synchronised train different models. This module sees both: parameters that are not those of the
beginning, before a forward; and gradients that nobody synchronises, when they arrive.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils.weak import WeakTensorKeyDictionary

from distribute.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.nn.parallel import DistributedDataParallel

# Of each parameter that is listened to, the watches of the wrappers that it is in.
_watches: Any = WeakTensorKeyDictionary()


class Watch:
    """Looks after one wrapped module.

    Args:
        wrapper: The wrapper.
        find_unused: Whether DDP does without the gradients of some parameters.
        listen: Whether to look at gradients when they arrive.

    Attributes:
        trained: Names of the parameters that DDP synchronises, in its order.
    """

    def __init__(
        self, wrapper: DistributedDataParallel, *, find_unused: bool, listen: bool
    ) -> None:
        module = cast("nn.Module", cast("Any", wrapper).module)
        ignored: set[str] = set(module.__dict__.get("_ddp_params_and_buffers_to_ignore", ()))
        layers: list[Any] = list(module.modules())
        self._wrapper = weakref.ref(wrapper)
        self._group = weakref.ref(cast("Any", dist.group.WORLD))
        self._module = module
        self._find_unused = find_unused
        # Looked at before each forward: of each layer its parameters, then and now, and its parts.
        self._tables: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = [
            (one._parameters, {**one._parameters}, one._modules, len(one._modules))
            for one in layers
            if isinstance(one._parameters, dict)  # a scripted module takes no others anyway
        ]
        named = [item for item in module.named_parameters() if item[0] not in ignored]
        self.trained = [name for name, one in named if one.requires_grad]
        self._trained = [one for _, one in named if one.requires_grad]
        self._frozen = [one for _, one in named if not one.requires_grad]
        self._ignored = [one for name, one in module.named_parameters() if name in ignored]
        self._expecting = False  # DDP waits for gradients of a forward
        self._local = False  # the last forward was one of no_sync
        self._ending = False  # the end of the running backward is waited for
        self._come: set[int] = set()  # parameters that have their gradient since that forward
        if listen:
            self._listen()

    def over(self) -> bool:
        """Tells whether the call is over in which the module was wrapped."""
        group = self._group()
        return group is None or dist.group.WORLD is not group

    def all_frozen(self) -> bool:
        """Tells whether nothing is trained now, as a discriminator in the generator's turn."""
        return not any(one.requires_grad for one in self._trained)

    def check(self) -> None:
        """Raises RequestError if DDP no longer knows what is trained."""
        changed = any(
            len(now) != len(then)
            or len(children) != count
            or any(now.get(name) is not one for name, one in then.items())
            for now, then, children, count in self._tables
        )
        if changed:
            known = {id(one) for one in (*self._trained, *self._frozen, *self._ignored)}
            new = [
                name
                for name, one in self._module.named_parameters()
                if one.requires_grad and id(one) not in known
            ]
            if new:
                raise self._refusal(new, "added or replaced")
        if any(one.requires_grad for one in self._frozen):
            loose = {id(one) for one in self._frozen if one.requires_grad}
            raise self._refusal(self._names(loose), "unfrozen")
        if not self._find_unused and not all(one.requires_grad for one in self._trained):
            fixed = {id(one) for one in self._trained if not one.requires_grad}
            raise self._refusal(self._names(fixed), "frozen")

    def _names(self, wanted: set[int]) -> list[str]:
        return [name for name, one in self._module.named_parameters() if id(one) in wanted]

    def _refusal(self, names: list[str], what: str) -> RequestError:
        return RequestError(
            f"{quoted(names)} of {type(self._module).__name__}, {what} after ctx.model",
            "DDP synchronises the parameters that were trainable when it wrapped the module",
            "change them before, or wrap again: model = ctx.model(ctx.unwrap(model))",
        )

    # -- gradients -----------------------------------------------------------------------------

    def begins(self, *, synchronised: bool) -> None:
        """Notes a forward whose backward DDP does, or does not, synchronise."""
        self._local = not synchronised
        if synchronised:
            self._expecting = True
            self._ending = False
            self._come.clear()

    def _listen(self) -> None:
        own = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            watch = own()
            if watch is None:
                return
            come, key = watch._come, id(parameter)
            if watch._ending and key not in come:
                come.add(key)  # nearly always, and it is called for all of them in each step
            else:
                watch._arrived(parameter)

        # One of each layer, as each costs some microseconds in every step: the one that gets its
        # gradient first, before DDP sees one of the layer. Of a product that is the bias.
        left = {id(one) for one in self._trained}
        for layer in self._module.modules():
            mine = [one for one in layer.parameters(recurse=False) if id(one) in left]
            left.difference_update(map(id, mine))  # a tied one is in several layers
            product = isinstance(layer, nn.Linear | nn.Bilinear)
            for one in mine[-1:] if product else mine[:1]:
                handle = cast("Any", one).register_post_accumulate_grad_hook(hook)
                weakref.finalize(self, handle.remove).atexit = False
                _watches.setdefault(one, weakref.WeakSet()).add(self)

    def _arrived(self, parameter: torch.Tensor) -> None:
        wrapper: Any = self._wrapper()
        if wrapper is None or self._local or not wrapper.require_backward_grad_sync or self.over():
            return
        if self._expecting:
            if id(parameter) in self._come and not wrapper.static_graph:
                raise self._twice(parameter)
            self._come.add(id(parameter))
            if not self._ending:
                self._ending = True
                # Twice, so that it comes after the callback by which DDP ends its own work.
                _at_end_of_backward(lambda: _at_end_of_backward(self._end))
            return
        # Another wrapper of the same parameter expects it.
        if any(one._expecting or one._local for one in _watches[parameter]):
            return
        names = self._names({id(parameter)})
        kind = type(self._module).__name__
        raise RequestError(
            f"a gradient of {quoted(names)} of {kind}",
            "it comes from a forward pass beside the model's own, such as model.part(x) or a "
            "method of it, or from a second backward pass, and DDP does not synchronise such "
            "gradients",
            'call model(...), or name the method, ctx.model(module, forward="method"), or have '
            "each rank keep its own gradients, with ctx.no_sync(model)",
        )

    def _twice(self, parameter: torch.Tensor) -> RequestError:
        names = self._names({id(parameter)})
        return RequestError(
            f"a second gradient of {quoted(names)} of {type(self._module).__name__} after one "
            "forward pass",
            "DDP synchronises the gradient of a parameter once",
            "add up the losses that lead to it, and call backward once: "
            "(loss_a + loss_b).backward()",
        )

    def _end(self) -> None:
        self._ending = False
        try:
            cast("Any", self._wrapper())._check_reducer_finalized()
        except RuntimeError:
            return  # more gradients are to come, in another backward
        self._expecting = False


def quoted(names: list[str]) -> str:
    """Returns names of parameters as messages have them: the first few."""
    shown = ", ".join(map(repr, names[:_MOST_NAMES]))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"parameter{'s' if len(names) > 1 else ''} {shown}{more}"


_MOST_NAMES = 5


def _at_end_of_backward(function: Callable[[], None]) -> None:
    engine: Any = Variable._execution_engine
    engine.queue_callback(function)
