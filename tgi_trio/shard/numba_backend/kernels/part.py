"""How a kernel is compiled: only into its callers, or to an object file.

numba optimises every function on its own, generates its machine code, and then compiles it once
more as a part of each caller. Here a kernel that only other kernels call stays unoptimised LLVM IR
until it is in an `entry`, where all of it is optimised once.
"""

from __future__ import annotations

from typing import Any

from numba import _dynfunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import LoweringPass, PassManager, register_pass
from numba.core.typed_passes import AnnotateTypes, NativeLowering

# numba passes for what kernels do not contain: closures, `with`, literal loops, array expressions.
_UNNEEDED = {
    "WithLifting",
    "InlineClosureLikes",
    "RewriteSemanticConstants",
    "DeadBranchPrune",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "InlineInlinables",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "LiteralPropagationSubPipelinePass",
    "InlineOverloads",
    "NopythonRewrites",
}


class _PartLibrary(JITCodeLibrary):
    """The code of one kernel and its callees, to be linked into its callers."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Do nothing: the `entry` is optimised as a whole."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _EntryLibrary(JITCodeLibrary):
    """The code of an entry and of all its callees, optimised and emitted as an object file."""

    def _finalize_final_module(self) -> None:
        self._verify_declare_only_symbols()
        self._finalized = True

    def emit_object(self, function: str, symbol: str) -> bytes:
        """Return the object file, in which `function` is named `symbol`."""
        with global_compiler_lock:
            self._ensure_finalized()
        self._final_module.get_function(function).name = symbol
        data: bytes = self._codegen._tm.emit_object(self._final_module)
        return data


class _Keep(LoweringPass):
    """Before the lowering: have it write into our library, and do not make the code executable."""

    library: Any

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        state.library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        return False


@register_pass(mutates_CFG=False, analysis_only=True)
class _KeepAsPart(_Keep):
    _name = "tgi_trio_keep_as_part"
    library = _PartLibrary


@register_pass(mutates_CFG=False, analysis_only=True)
class _KeepAsEntry(_Keep):
    _name = "tgi_trio_keep_as_entry"
    library = _EntryLibrary


@register_pass(mutates_CFG=False, analysis_only=True)
class _MakeCallable(LoweringPass):
    """After the lowering: register the kernel by a builtin function, where numba looks it up."""

    _name = "tgi_trio_make_callable"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        found, library = state.cr, state.library
        key = _dynfunc.make_function(
            found.fndesc.lookup_module(), found.fndesc.qualname, "", 0, found.env, (library,)
        )
        state.targetctx.insert_user_function(key, found.fndesc, [library])
        state.cr = found._replace(cfunc=key)
        return False


class PartCompiler(CompilerBase):
    """numba's pipeline with one pass before and one after its lowering."""

    keep: type[_Keep] = _KeepAsPart

    def define_pipelines(self) -> list[PassManager]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(self.keep, AnnotateTypes)
        passes.add_pass_after(_MakeCallable, NativeLowering)
        passes.passes = [each for each in passes.passes if each[0].__name__ not in _UNNEEDED]
        passes.finalize()
        return [passes]


class EntryCompiler(PartCompiler):
    """The same pipeline for an entry."""

    keep = _KeepAsEntry
