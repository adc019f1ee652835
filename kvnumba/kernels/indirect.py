"""Call a compiled function by its address.

A parallel kernel passes through five levels of Numba's machinery, and each level optimises and
compiles everything it calls anew. A large function that is called by address is compiled once.
The address is an argument, not a constant, so that both sides can be cached on disk.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from kvnumba.kernels.jit import JIT


def address_of(function: Any, argument_types: tuple) -> Any:
    """Return the address of `function` compiled for `argument_types`; plain Python: itself."""
    if not JIT:
        return function
    function.compile(argument_types)
    compiled = function.overloads[argument_types]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)


def _same_layout(given, wanted):
    """Return whether two Numba types are passed alike; a read-only array is like any other."""
    if isinstance(given, types.Array) and isinstance(wanted, types.Array):
        return (given.dtype, given.ndim, given.layout) == (wanted.dtype, wanted.ndim, wanted.layout)
    return types.unliteral(given) == wanted


def make_call(argument_types: tuple) -> Any:
    """Return ``call(address, arguments)`` for functions that take `argument_types`.

    The function returns nothing; what it raises passes through. The result has to be a module
    global, or what uses it cannot be cached.
    """
    if not JIT:
        return lambda function, arguments: function(*arguments)

    @intrinsic
    def call(typingctx, address, arguments):
        given = tuple(arguments)
        if len(given) != len(argument_types) or not all(map(_same_layout, given, argument_types)):
            raise TypingError(f"called with {given}, compiled for {argument_types}")

        def emit(context, builder, signature, args):
            convention = context.call_conv
            function = convention.get_function_type(types.none, argument_types)
            pointer = builder.inttoptr(args[0], function.as_pointer())
            values = [builder.extract_value(args[1], j) for j in range(len(given))]
            status, _ = convention.call_function(builder, pointer, types.none, given, values)
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return context.get_dummy_value()

        return types.none(types.intp, arguments), emit

    return call
