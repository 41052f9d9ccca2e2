"""Flags of XLA for tests, which compile far more than they compute."""

import importlib.metadata

QUICK = [
    # A third of the compile time (two tree builders: 162 s with LLVM's optimisations, 51 s without).
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # Programs are small and both cores busy already (two files of drafters: 25.7 s of CPU time, 23.5 so).
    "--xla_cpu_parallel_codegen_split_count=1",
    # XLA evaluates masks and templates of trees element by element (two files: 66 s of CPU time, 62 without; of the
    # golden trees a quarter).
    "--xla_disable_hlo_passes=constant_folding",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later releases abort at flags they do not know
    # Two files of drafters: 60 s of CPU time, 38 without.
    QUICK.append("--xla_cpu_use_fusion_emitters=false")


def flags(devices: int, quick: bool = True) -> str:
    """For a process with so many fake devices; not `quick` for one that computes more than it compiles."""
    return " ".join((f"--xla_force_host_platform_device_count={devices}", *(QUICK if quick else ())))
