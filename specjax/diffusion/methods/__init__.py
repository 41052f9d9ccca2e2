"""Published methods of diffusion decoding, one file each. A method builds a procedure from its own and shared parts."""

from specjax.diffusion.methods.adablock import adablock
from specjax.diffusion.methods.ccd import ccd
from specjax.diffusion.methods.constraint import constraint
from specjax.diffusion.methods.credit_decoding import credit_decoding
from specjax.diffusion.methods.dimple import dimple
from specjax.diffusion.methods.dkv_cache import dkv_cache
from specjax.diffusion.methods.dparallel import dparallel
from specjax.diffusion.methods.dream import dream
from specjax.diffusion.methods.entropy_bound import entropy_bound
from specjax.diffusion.methods.eoser import eoser
from specjax.diffusion.methods.ete import ete
from specjax.diffusion.methods.fast_dllm import fast_dllm
from specjax.diffusion.methods.fast_dllm_pp import fast_dllm_pp
from specjax.diffusion.methods.fast_dllm_v2 import fast_dllm_v2
from specjax.diffusion.methods.freedave import freedave
from specjax.diffusion.methods.iter_smooth import iter_smooth
from specjax.diffusion.methods.learn2pd import learn2pd
from specjax.diffusion.methods.linear_spec import linear_spec
from specjax.diffusion.methods.llada import llada
from specjax.diffusion.methods.llada21 import llada21
from specjax.diffusion.methods.local_leap import local_leap
from specjax.diffusion.methods.prophet import prophet
from specjax.diffusion.methods.r2_dllm import r2_dllm
from specjax.diffusion.methods.s2d2 import s2d2
from specjax.diffusion.methods.s2d2_routed import s2d2_routed
from specjax.diffusion.methods.sdar import sdar
from specjax.diffusion.methods.window_diffusion import window_diffusion

__all__ = [
    "adablock",
    "ccd",
    "constraint",
    "credit_decoding",
    "dimple",
    "dkv_cache",
    "dparallel",
    "dream",
    "entropy_bound",
    "eoser",
    "ete",
    "fast_dllm",
    "fast_dllm_pp",
    "fast_dllm_v2",
    "freedave",
    "iter_smooth",
    "learn2pd",
    "linear_spec",
    "llada",
    "llada21",
    "local_leap",
    "prophet",
    "r2_dllm",
    "s2d2",
    "s2d2_routed",
    "sdar",
    "window_diffusion",
]
