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
    "catalog/test_methods.py::test_every_draft_is_one_that_its_rule_can_take[rasd]",
    "catalog/test_methods.py::test_the_same_text_under_x64[auto]",
    "catalog/test_methods.py::test_the_same_text_under_x64[two_model]",
    "cli/test_endings.py::test_stdout_on_a_full_disk[arguments1]",
    "cli/test_generate.py::test_goodput_knows_what_the_draft_model_costs",
    "controllers/test_controllers.py::test_sampled_text_keeps_its_law_under_the_adversary[stopping beams]",
    "decoders/test_continuous.py::test_the_joint_law_of_four_tokens[path]",
    "drafters/combined/test_auto.py::test_text_is_that_of_plain_decoding[1.0]",
    "drafters/combined/test_rasd.py::test_any_drafter_of_point_mass_trees_can_be_fused[early_exit]",
    "drafters/heads/test_learned.py::test_a_head_remembers_the_text_as_if_it_had_read_it_at_once[clover-options0]",
    "drafters/heads/test_learned.py::test_a_head_remembers_the_text_as_if_it_had_read_it_at_once[eagle3-options3]",
    "drafters/heads/test_learned.py::test_a_head_remembers_the_text_as_if_it_had_read_it_at_once[hydra-options4]",
    "drafters/layers/test_dynamic_exit.py::test_shadow_tokens_of_an_exit_are_its_drafts_and_of_the_last_layer_the_targets[4-2]",
    "drafters/layers/test_swift.py::test_the_tree_is_lossless_and_deeper_than_it_is_wide",
    "drafters/model/test_easyspec.py::test_sampled_text_has_the_law_of_the_target",
    "drafters/model/test_hierarchical.py::test_greedy_and_coupled_text_is_the_targets[0.0-False]",
    "drafters/model/test_hierarchical.py::test_greedy_and_coupled_text_is_the_targets[0.9-True]",
    "drafters/model/test_hierarchical.py::test_hierarchical_within_hierarchical",
    "drafters/model/test_hierarchical.py::test_sampled_text_has_the_law_of_the_target[2-False]",
    "drafters/model/test_hierarchical.py::test_sampled_text_has_the_law_of_the_target[2-True]",
    "drafters/model/test_hierarchical.py::test_tokens_per_pass_are_those_of_the_enumeration[2-True]",
    "drafters/model/test_other_vocabulary.py::test_greedy_and_coupled_text_is_that_of_plain_decoding[hierarchical-66]",
    "drafters/tables/test_jacobi.py::test_a_second_call_compiles_nothing",
    "drafters/tables/test_jacobi.py::test_greedy_text_is_that_of_plain_decoding",
    "drafters/tables/test_jacobi.py::test_joint_law_and_expected_passes_with_random_tokens[2]",
    "drafters/tables/test_jacobi.py::test_joint_law_with_every_kind_of_initial_token[options1]",
    "drafters/tables/test_jacobi.py::test_without_drafts_it_is_plain_sampling",
    "drafters/tables/test_stand.py::test_sampled_text_has_the_joint_law_of_the_target[recursive_rejection]",
    "drafters/tables/test_stand.py::test_sampled_text_has_the_joint_law_of_the_target[sample_and_match]",
    "engine/test_requests.py::test_coupled_texts_too",
    "engine/test_requests.py::test_each_text_is_that_of_its_own_settings[prompt_lookup]",
    "engine/test_serve.py::test_texts_do_not_depend_on_when_requests_come[setting11]",
    "engine/test_serve.py::test_texts_do_not_depend_on_when_requests_come[setting7]",
    "engine/test_serve.py::test_what_one_request_taught_serves_the_next_one[aded]",
    "engine/test_serve.py::test_what_one_request_taught_serves_the_next_one[stand]",
    "engine/test_x64.py::test_trees_of_two_models_under_their_rules[2x2-rule0]",
    "models/test_cache.py::test_int8_greedy_text_does_not_depend_on_the_draft[True]",
    "models/test_other_memories.py::test_sampled_text_has_the_law_of_the_target[encoding]",
    "parallel/test_sharding.py::test_a_draft_model_on_fewer_devices_than_its_target[over1]",
    "parallel/test_sharding.py::test_int8_cache_is_spread_like_any_other[2-4-2]",
    "trees/test_growing.py::test_sampled_text_has_the_law_of_the_target[dyspec]",
    "trees/test_growing.py::test_sampled_text_has_the_law_of_the_target[rsd_s]",
    "trees/test_stops.py::test_coupled_text_is_the_targets_wherever_rows_stop",
    "trees/test_stops.py::test_sampled_text_has_the_law_of_the_target[tree1]",
    "verifiers/exact/test_exact_rules.py::test_multipath_block_in_passes_of_any_width[None-controller1-None]",
}
"""Of the dearest tests, 4 to 17 s of CPU time each, those whose proof another one carries for an easier setting or, in
the conformance suite, for this method."""


def is_repeated(nodeid: str) -> bool:
    """Whether REPEATED names it."""
    return nodeid.removeprefix("tests/") in REPEATED
