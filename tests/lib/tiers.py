"""Which tests run in `make test`; the others are of the tier `exhaustive`."""

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive(*values: Any, **options: Any):
    """One parametrization for the tier `exhaustive`."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, **options)


def those(quick: Iterable[Any], values: Iterable[Any]) -> list:
    """The values, those that are not `quick` in the tier `exhaustive`."""
    return [value if value in quick else exhaustive(value) for value in values]


REPEATED = {
    "catalog/test_decoders.py::test_rows_do_not_depend_on_their_batch[pearl_in_one_program]",
    "catalog/test_methods.py::test_the_same_text_under_x64[two_model]",
    "cli/test_endings.py::test_stdout_on_a_full_disk[arguments1]",
    "cli/test_generate.py::test_goodput_knows_what_the_draft_model_costs",
    "controllers/test_controllers.py::test_sampled_text_keeps_its_law_under_the_adversary[stopping beams]",
    "decoders/test_continuous.py::test_the_joint_law_of_four_tokens[path]",
    "drafters/combined/test_auto.py::test_text_is_that_of_plain_decoding[1.0]",
    "drafters/model/test_easyspec.py::test_sampled_text_has_the_law_of_the_target",
    "drafters/model/test_hierarchical.py::test_greedy_and_coupled_text_is_the_targets[0.9-True]",
    "drafters/model/test_hierarchical.py::test_sampled_text_has_the_law_of_the_target[2-True]",
    "drafters/model/test_hierarchical.py::test_tokens_per_pass_are_those_of_the_enumeration[2-True]",
    "drafters/tables/test_jacobi.py::test_joint_law_and_expected_passes_with_random_tokens[2]",
    "drafters/tables/test_jacobi.py::test_joint_law_with_every_kind_of_initial_token[options1]",
    "drafters/tables/test_stand.py::test_sampled_text_has_the_joint_law_of_the_target[sample_and_match]",
    "engine/test_requests.py::test_coupled_texts_too",
    "engine/test_requests.py::test_each_text_is_that_of_its_own_settings[prompt_lookup]",
    "engine/test_serve.py::test_texts_do_not_depend_on_when_requests_come[setting7]",
    "engine/test_serve.py::test_what_one_request_taught_serves_the_next_one[aded]",
    "engine/test_serve.py::test_what_one_request_taught_serves_the_next_one[stand]",
    "models/test_cache.py::test_int8_greedy_text_does_not_depend_on_the_draft[True]",
    "models/test_other_memories.py::test_sampled_text_has_the_law_of_the_target[encoding]",
    "parallel/test_sharding.py::test_a_draft_model_on_fewer_devices_than_its_target[over1]",
    "parallel/test_sharding.py::test_int8_cache_is_spread_like_any_other[2-4-2]",
    "trees/test_growing.py::test_sampled_text_has_the_law_of_the_target[dyspec]",
    "trees/test_growing.py::test_sampled_text_has_the_law_of_the_target[rsd_s]",
    "trees/test_stops.py::test_sampled_text_has_the_law_of_the_target[tree1]",
    "verifiers/exact/test_exact_rules.py::test_multipath_block_in_passes_of_any_width[None-controller1-None]",
}
"""Of the dearest tests, 4 to 17 s of CPU time each, those whose proof another one carries for an easier setting or, in
the conformance suite, for this method."""


def is_repeated(nodeid: str) -> bool:
    """Whether REPEATED names it."""
    return nodeid.removeprefix("tests/") in REPEATED
