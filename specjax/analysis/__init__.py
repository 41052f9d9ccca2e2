"""Quality of acceptance rules: acceptance on given distributions, the best possible value, and tokens per pass.

`dsi` simulates the time with several copies of the target.
"""

from specjax.analysis.dsi import DsiTimes, dsi, servers, smallest_lookahead
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
    "block_efficiency",
    "compare",
    "depth_curve",
    "dsi",
    "efficiency_of",
    "expected_tokens",
    "join_records",
    "last_token_model",
    "load_record",
    "optimal_acceptance",
    "plot",
    "record",
    "save_record",
    "servers",
    "smallest_lookahead",
]
