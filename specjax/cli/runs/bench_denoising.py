"""The runs behind `specjax bench` of a diffusion model: every prompt with each method, and one column a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax

from specjax.bench import measure
from specjax.bench import records as report
from specjax.catalog import METHODS
from specjax.cli.options.common import Settings
from specjax.cli.options.grid import Way
from specjax.cli.options.prompts import Encoded
from specjax.cli.runs.bench import Group, Runs
from specjax.cli.runs.denoising import one_a_pass
from specjax.cli.runs.session import Session, peak_memory_bytes
from specjax.diffusion import Denoiser, Procedure

ONE = "one column a pass"


def _same(one: Procedure, other: Procedure) -> bool:
    """Whether they have equal parts; of what has arrays it is not told."""
    return not jax.tree.leaves(one) and not jax.tree.leaves(other) and one == other


class DenoisingBench(Runs):
    """Methods against one column a pass, each in its own blocks.

    ways: by what they are called. What promises the text of the procedure that it speeds up is compared with that, too.
    """

    def __init__(
        self, session: Session, denoiser: Denoiser, settings: Settings, ways: Mapping[str, Way], rows: list[Encoded],
        batch_size: int, repeats: int,
    ):  # fmt: skip
        self.ways = ways
        self.denoiser, self.procedures, self.plain = denoiser, dict[str, Procedure](), {}
        self.static: dict[str, Procedure] = {}  # what an `identical` method speeds up, if it is not one column a pass
        for name, (method, own) in ways.items():
            made: Procedure = METHODS[method].make(denoiser, **own)
            plain = one_a_pass(denoiser, own)
            in_blocks = f"{ONE}, blocks of {own['block']}" if "block" in own and not denoiser.is_causal else ONE
            self.procedures |= {in_blocks: plain, name: made}
            self.plain[name] = in_blocks
            static = made.replace(verify=None)
            if METHODS[method].guarantee == "identical" and not _same(static, plain):
                self.static[name] = static
        super().__init__(session, settings, list(ways), self.procedures, rows, batch_size, repeats)

    def decode(self, program: str, group: Group) -> report.Run:
        """As `specjax.denoise`."""
        return self._denoise(self.procedures[program], group)

    def differences(self, group: Group, method: str) -> Iterable[dict]:
        """Those from the procedure that the method promises the text of."""
        if METHODS[self.ways[method].method].guarantee != "identical":
            return
        static = self.static.get(method)
        other = group.runs[self.plain[method]] if static is None else self._denoise(static, group)
        for row, ours, plain in zip(group.rows, group.runs[method].tokens, other.tokens, strict=True):
            if ours != plain:
                place = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), None)
                place = min(len(ours), len(plain)) if place is None else place
                pieces = [self.session.tokenizer.decode(text[place : place + 1]) for text in (ours, plain)]
                yield {
                    "method": method, "task": group.task, "line": row.prompt.line,
                    "question_id": row.prompt.question_id, "position": place, "text": pieces[0],
                    "plain_text": pieces[1],
                }  # fmt: skip

    def record(self, method: str, task: str | None = None) -> dict:
        """The JSON record of a method on a task (None: on all), of what is done.

        In bfloat16 a pass of another width may turn near-ties, so there texts that differ are listed, not refused.
        """
        own = self.of_task(method, task)
        refused = bool(own.differences) and self.session.dtype == "float32"
        name, options = self.ways[method]
        entry = report.denoising_record(
            name,
            METHODS[name].guarantee,
            own.run,
            own.plain,
            refused=refused,
            compile_seconds=own.compile_seconds,
            peak_memory_bytes=peak_memory_bytes(),
        )
        more = {"options": options, "median_speedup": None if refused else own.median_speedup, "refused": refused}
        return entry | more

    def _denoise(self, procedure: Procedure, group: Group) -> report.Run:
        own = self.settings
        keys = measure.row_keys(own.seed, [row.ordinal for row in group.rows])
        options = {
            "max_new_tokens": own.max_new_tokens, "temperature": own.temperature, "top_k": own.top_k,
            "top_p": own.top_p, "min_p": own.min_p, "eos": self.session.tokenizer.eos,
        }  # fmt: skip
        return measure.run_denoise(self.denoiser, procedure, group.ids, keys, options)
