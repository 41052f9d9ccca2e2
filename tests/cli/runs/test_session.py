"""The drafter of a session: a server's default stop condition and controller."""

from types import SimpleNamespace

import pytest
from heads import tiny_head
from toy import tiny_llama

from specjax.cli.options.drafter_flags import FlagValue, MethodOptions
from specjax.cli.runs import session
from specjax.trees import stops


def options_of(monkeypatch, kind, flags, *, serving):
    """Return the options with which a session builds the drafter of a head."""
    options = {}
    monkeypatch.setattr(session, "make_drafter", lambda *arguments, **values: options.update(values))
    monkeypatch.setattr(session.Session, "on_mesh", lambda self, drafter: drafter)
    target = tiny_llama()
    head = SimpleNamespace(head=tiny_head(kind, target))
    method_options = MethodOptions({kind: {name: FlagValue("--x", value) for name, value in flags.items()}})
    session.Session(target, None, None, "float32", 0.0, head=head).drafter(kind, method_options, serving=serving)
    return options


@pytest.mark.parametrize(
    ("kind", "flags", "serving", "expected"),
    [
        ("dspark", {}, True, stops.budget()),
        ("dspark", {}, False, None),
        ("dspark", {"stop": stops.drafter_confidence(0.5)}, True, stops.drafter_confidence(0.5)),
        ("dspark", {"tree": "2x1"}, True, None),
        ("dflash", {}, True, None),
    ],
)
def test_a_server_stops_confident_heads_by_its_budget(monkeypatch, kind, flags, serving, expected):
    options = options_of(monkeypatch, kind, flags, serving=serving)
    assert options.get("stop") is expected
    # The confidences that the server's controller reads.
    assert options.get("keep_confidence", False) == (expected is stops.budget())
