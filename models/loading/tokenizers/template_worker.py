"""The program of a process that renders chat templates: a request per line of stdin, an answer per line of stdout.

A template is code out of a model file, and a sandbox alone does not bound what one expression of it allocates or how
long a filter runs. So it runs in a process of its own, with limits, of which `chat.py` is the other side. Imports
nothing of specjax: it has to start quickly.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import sys
from typing import Any

MEMORY = 1 << 30
"""Bytes of address space, where the system has such a limit."""

ROOM = 1 << 20
"""Characters that a template may write besides four times what it is given."""


class TooLong(Exception):
    pass


@functools.lru_cache(maxsize=8)
def compiled(source: str):
    """In the environment of `transformers`, which chat templates are written for, but without `lipsum`."""
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %}, which marks what the assistant wrote: here only its text counts."""

        tags = {"generation"}  # noqa: RUF012, as jinja2 has it

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)  # a scope of its own

        def _text(self, caller) -> str:
            return caller()

    class Dict:
        """`dict`, without a class's attributes."""

        def __call__(self, *args, **kwargs):
            return dict(*args, **kwargs)

        def fromkeys(self, *args):
            return dict.fromkeys(*args)

    def refuse(message: str):
        raise jinja2.TemplateError(message)

    def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    env.globals["dict"] = Dict()
    del env.globals["lipsum"]
    return env.from_string(source)


def answer(request: dict[str, Any], most: int) -> dict[str, str]:
    """{"text": ...}, or what is wrong: "refused" by the template itself, "broken" or "failed"."""
    import jinja2

    try:
        pieces, length = [], 0
        for piece in compiled(request["template"]).generate(
            messages=request["messages"], add_generation_prompt=True, **request["names"]
        ):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                raise TooLong(f"more than {most:,} characters")
        return {"text": "".join(pieces)}
    except jinja2.TemplateSyntaxError as error:
        return {"broken": f"{error.message} in line {error.lineno}"[:500]}
    except jinja2.TemplateError as error:
        return {"refused": str(error)[:500]}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500].removesuffix(": ")}


def limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def limit_time(seconds: float) -> None:
    """Of the request that begins, should the process that asks be gone when it takes too long."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, hard))


def main() -> None:
    import jinja2.sandbox  # noqa: F401, before the first request's time runs

    limit_memory()
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        limit_time(request["seconds"])
        print(json.dumps(answer(request, most=4 * len(line) + ROOM)), flush=True)


if __name__ == "__main__":
    main()
