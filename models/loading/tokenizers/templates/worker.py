"""Worker process that renders chat templates: it reads one request per line of stdin and writes one answer per line.

A template is code from a model file. A sandbox alone does not limit the memory of an expression or the time of a
filter. So templates run in a separate process with limits, which `rendering.py` starts. This module imports no other
part of specjax, so that it starts quickly.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import sys
from typing import Any

MEMORY_LIMIT = 1 << 30
"""Bytes of address space, on systems with such a limit."""

EXTRA_CHARACTERS = 1 << 20
"""Characters that a template may write in addition to four times its input."""


ALWAYS = {"add_generation_prompt": True, "tools": None, "documents": None}
"""Variables that every template is given, as `transformers` does. Others are given only to templates that read them."""


class OutputTooLong(Exception):
    pass


@functools.cache
def make_environment():
    """Return the environment of `transformers`, which templates are written for, without `lipsum`."""
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """The tag {% generation %}, which marks the assistant's text. Only the text is used here."""

        tags = {"generation"}  # noqa: RUF012, the form of jinja2

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)  # its own scope

        def _text(self, caller) -> str:
            return caller()

    class Dict:
        """The function `dict`, without the attributes of a class."""

        def __call__(self, *args, **kwargs):
            return dict(*args, **kwargs)

        def fromkeys(self, *args):
            return dict.fromkeys(*args)

    def refuse(message: str):
        raise jinja2.TemplateError(message)

    def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    env.globals["dict"] = Dict()
    del env.globals["lipsum"]
    return env


@functools.lru_cache(maxsize=8)
def compile_template(source: str):
    """Return the template, and the names of the variables that it reads."""
    from jinja2 import meta

    env = make_environment()
    template = env.from_string(source)
    return template, meta.find_undeclared_variables(env.parse(source)) - {*env.globals}


def render_request(request: dict[str, Any], max_characters: int) -> dict[str, str]:
    """Return {"text": ...}, or an error.

    Errors: "refused" by the template itself, "broken" or "failed", or "unread", a variable that it does not read.
    """
    import jinja2

    try:
        template, reads = compile_template(request["template"])
        for name, value in request["variables"].items():
            if name not in reads and name != "add_generation_prompt" and (name not in ALWAYS or value is not None):
                return {"unread": name, "reads": ", ".join(sorted(reads - {*ALWAYS, "messages"}))[:300]}
        values = ALWAYS | request["names"] | request["variables"]
        pieces, length = [], 0
        for piece in template.generate(messages=request["messages"], **values):
            pieces.append(piece)
            length += len(piece)
            if length > max_characters:
                raise OutputTooLong(f"more than {max_characters:,} characters")
        return {"text": "".join(pieces)}
    except jinja2.TemplateSyntaxError as error:
        return {"broken": f"{error.message} in line {error.lineno}"[:500]}
    except jinja2.TemplateError as error:
        return {"refused": str(error)[:500]}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500].removesuffix(": ")}


def limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not available on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def limit_time(seconds: float) -> None:
    """Limit the CPU time of the next request, in case the parent process ends before its time limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, hard))


def main() -> None:
    import jinja2.sandbox  # noqa: F401, before the time of the first request starts

    limit_memory()
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        limit_time(request["seconds"])
        print(json.dumps(render_request(request, max_characters=4 * len(line) + EXTRA_CHARACTERS)), flush=True)


if __name__ == "__main__":
    main()
