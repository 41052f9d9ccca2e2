"""How good an acceptance rule is: its acceptance on given distributions, the best possible, its tokens per pass.

And what its acceptance gives in time where several copies of the target verify (`dsi`).
"""

from specjax.analysis.acceptance import FORMULAS, Acceptance, Comparison, Entry, acceptance, acceptance_curve, compare
from specjax.analysis.dsi import DsiTimes, dsi, servers, smallest_lookahead
from specjax.analysis.efficiency import BlockEfficiency, block_efficiency, depth_curve, efficiency_of, last_token_model
from specjax.analysis.one_pass import expected_tokens
from specjax.analysis.optimal import OptimalAcceptance, optimal_acceptance
from specjax.analysis.plot import plot
from specjax.analysis.records import Record, join_records, load_record, record, save_record

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
