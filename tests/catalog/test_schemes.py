"""Names of schemes, and of the models that they make."""

import types

import pytest

from specjax.catalog.defaults import SHIPPED_HEADS, defaults
from specjax.catalog.schemes import SCHEME_NAMES, check_scheme, with_scheme, without_scheme
from specjax.errors import UsageError
from specjax.models.storage import SCHEMES


def test_every_scheme_has_a_format():
    assert tuple(SCHEMES) == SCHEME_NAMES
    for name in (*SCHEME_NAMES, None):
        check_scheme(name)
    with pytest.raises(UsageError, match=r'--quantize must be one of int8, .*, fp8, not "int3"'):
        check_scheme("int3", "--quantize")


@pytest.mark.parametrize("name", ["smollm2-135m", "org/model (draft)", "a)", "(int8", "model (int8) v2", ""])
def test_a_name_without_its_scheme(name):
    assert without_scheme(name) == name
    for scheme in SCHEME_NAMES:
        assert without_scheme(with_scheme(name, scheme)) == name


def test_a_quantised_target_has_the_head_of_its_original():
    [(name, head)] = SHIPPED_HEADS.items()
    able = types.SimpleNamespace(num_layers=head.num_layers, trees=True, taps=True)
    for model_name in (name, with_scheme(name, "int8")):
        model = types.SimpleNamespace(name=model_name, vocab_size=head.vocab_size, capabilities=able)
        assert defaults(types.SimpleNamespace(model=model), None, "cpu").head == head.name
