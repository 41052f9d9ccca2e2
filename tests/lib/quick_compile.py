"""Quick compilation for tests, which compile far more than they compute: flags of XLA, and shared contexts of MLIR."""

import importlib.metadata
import threading

SKIPPED = [
    # XLA evaluates masks and templates of trees element by element (two files: 66 s of CPU time, 62 without; of the
    # golden trees a quarter).
    "constant_folding",
    # What makes a program quicker, tried again and again until nothing changes, and what is for operations that are not
    # here (four files: 176 s of CPU time with the passes below, 138 to 153 without).
    *("simplify-while-loops", "while-loop-invariant-code-motion", "while-loop-constant-sinking"),
    *("while-loop-trip-count-annotator", "small-while-loop-hoisting", "simplify-sorts", "simplify-conditional"),
    *("conditional-to-select", "reshape-mover", "tree_reduction_rewriter", "batch-dot-simplification", "gemv-rewriter"),
    *("literal-canonicalizer", "map-inline", "associative-scan-rewriter", "async-collective-replacer"),
    *("cpu-all-reduce-combiner", "strip-memory-placement-annotations"),
    *("dynamic-dimension-simplifier", "dynamic_padder", "propagate-call-metadata", "apply-xla-transforms"),
    *("convolution-group-converter", "convolution-canonicalization", "reduce-window-rewriter"),
    *("select_and_scatter_expander", "batchnorm_expander", "cholesky_expander", "qr_expander", "eigh_expander"),
    *("triangular_solve_expander", "rng-expander", "stochastic_convert_decomposer", "sub-byte-size-setter"),
    *("float-normalization-u4", "float-normalization-s4", "float-normalization-f4e2m1fn"),
    *("float-normalization-f8e3m4", "float-normalization-f8e4m3", "float-normalization-f8e4m3fn"),
    *("float-normalization-f8e4m3fnuz", "float-normalization-f8e4m3b11fnuz", "float-normalization-f8e5m2"),
    *("float-normalization-f8e5m2fnuz", "float-normalization-f8e8m0fnu"),
]

QUICK = [
    # A third of the compile time (two tree builders: 162 s with LLVM's optimisations, 51 s without).
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # Programs are small and both cores busy already (two files of drafters: 25.7 s of CPU time, 23.5 so).
    "--xla_cpu_parallel_codegen_split_count=1",
    f"--xla_disable_hlo_passes={','.join(SKIPPED)}",
]
IS_TESTED = importlib.metadata.version("jaxlib").startswith("0.10.")
if IS_TESTED:  # later releases abort at flags they do not know
    # Two files of drafters: 60 s of CPU time, 38 without.
    QUICK.append("--xla_cpu_use_fusion_emitters=false")


def flags(devices: int, quick: bool = True) -> str:
    """Return XLA's flags for a process with so many fake devices; not `quick` for one that computes more than it
    compiles."""
    return " ".join((f"--xla_force_host_platform_device_count={devices}", *(QUICK if quick else ())))


LOWERINGS = 200
"""Programs per context. A context keeps the constants of all its programs, so that it must end some time."""


def share_contexts() -> None:
    """Lower programs of a thread in one MLIR context. JAX makes one per program, and loads all dialects into each.

    Small programs take a third to a half less CPU time (a concatenation: 34 ms without, 18 with). One file of tests
    took 22.0 s without and 18.9 with.
    """
    if not IS_TESTED:  # nothing below is a public name of JAX
        return
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    make, local = mlir.make_ir_context, threading.local()

    def shared():
        if getattr(local, "left", 0) == 0:
            local.context, local.left = make(), LOWERINGS
        local.left -= 1
        return local.context

    class SharedContext(mlir.ModuleContext):
        def __init__(self, *arguments, context=None, **options):
            if context is None and ir.Context.current is None:  # a program inside of another would be written into it
                context = shared()
            super().__init__(*arguments, context=context, **options)

    mlir.ModuleContext = SharedContext
