"""The name of the target in a head's config, by which other engines load it."""

import json

import jax
import toy

from specjax.models.heads.kinds import KINDS, init_head
from specjax.models.loading.heads.target_fit import hub_name
from specjax.models.loading.heads.writing import save_head


def test_the_config_names_the_target_by_a_name_that_loads_elsewhere(tmp_path):
    target = toy.tiny_llama(layers=3)
    head = init_head("eagle3", KINDS["eagle3"].of_target(target.model.config), jax.random.key(0))

    def named(**options):
        save_head(tmp_path, head, target=target, **options)
        config = json.loads((tmp_path / "config.json").read_text())
        return config["speculators_config"]["verifier"]["name_or_path"]

    assert named() == target.model.name
    assert named(target_name="org/model") == "org/model"
    assert hub_name("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert hub_name("org/model") == "org/model"
