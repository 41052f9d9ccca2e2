"""Analysis of speculative and parallel decoding.

- `acceptance`, `compare`, `optimal_acceptance`: acceptance rules on given distributions, and the best possible value.
- `block_efficiency`, `expected_tokens`: tokens per target pass.
- `dsi`: simulated time with several copies of the target.
- `local_ar_ness`, `global_ar_ness`, `aup`: measures of diffusion decoding.
"""

from specjax.analysis.dsi import DsiTimes, dsi, servers, smallest_lookahead
from specjax.analysis.parallelism import aup, global_ar_ness, local_ar_ness, wilson_interval
from specjax.analysis.rules.acceptance import (
    FORMULAS,
    Acceptance,
    Comparison,
    Entry,
    acceptance,
    acceptance_curve,
    compare,
)
from specjax.analysis.rules.efficiency import (
    BlockEfficiency,
    block_efficiency,
    depth_curve,
    efficiency_of,
    last_token_model,
)
from specjax.analysis.rules.optimal import OptimalAcceptance, optimal_acceptance
from specjax.analysis.rules.plot import plot
from specjax.analysis.rules.records import Record, join_records, load_record, record, save_record
from specjax.analysis.rules.rule_comparison import expected_tokens

__all__ = [
    "FORMULAS",
    "Acceptance",
    "BlockEfficiency",
    "Comparison",
    "DsiTimes",
    "Entry",
    "OptimalAcceptance",
    "Record",
    "acceptance",
    "acceptance_curve",
    "aup",
    "block_efficiency",
    "compare",
    "depth_curve",
    "dsi",
    "efficiency_of",
    "expected_tokens",
    "global_ar_ness",
    "join_records",
    "last_token_model",
    "load_record",
    "local_ar_ness",
    "optimal_acceptance",
    "plot",
    "record",
    "save_record",
    "servers",
    "smallest_lookahead",
    "wilson_interval",
]
