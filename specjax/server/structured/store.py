"""The automata that are compiled from the constraints of requests."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from typing import Any

from specjax.errors import UsageError
from specjax.processors.automaton import Automaton, compile_pattern, json_schema, regex
from specjax.server.errors import ApiError
from specjax.server.structured.constraints import Constraint
from specjax.server.structured.tools import form_of, pattern_of_calls
from specjax.serving.automata import check_room
from specjax.serving.requests import Limits

SECONDS = 30.0
"""Longest time in which an automaton is compiled."""
NUM_STORED = 64
"""Automata that are stored for later requests."""
NUM_COMPILING = 2
"""Automata that are compiled at the same time."""


@dataclasses.dataclass
class AutomatonStore:
    """The automata of constraints. Those that were used last are stored."""

    tokenizer: Any
    limits: Limits
    _stored: OrderedDict[Constraint, Automaton] = dataclasses.field(default_factory=OrderedDict)
    _running: dict[Constraint, asyncio.Task[Automaton]] = dataclasses.field(default_factory=dict)
    _turns: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(NUM_COMPILING))

    async def automaton(self, constraint: Constraint) -> Automaton:
        """Return the automaton of a constraint. Equal constraints are compiled once.

        Raises: ApiError for one that cannot be compiled or needs too much room.
        """
        stored = self._stored.get(constraint)
        if stored is not None:
            self._stored.move_to_end(constraint)
            return stored
        task = self._running.get(constraint)
        if task is None:
            task = self._running[constraint] = asyncio.ensure_future(self._compile(constraint))
            task.add_done_callback(lambda _: self._running.pop(constraint, None))
        try:
            return await asyncio.shield(task)
        except UsageError as error:
            raise ApiError(400, f"the constraint does not fit: {error}") from None

    async def _compile(self, constraint: Constraint) -> Automaton:
        async with self._turns:
            automaton = await asyncio.to_thread(self._compiled, constraint)
        self._stored[constraint] = automaton
        if len(self._stored) > NUM_STORED:
            self._stored.popitem(last=False)
        return automaton

    def _compiled(self, constraint: Constraint) -> Automaton:
        room, vocab = self.limits.constraint_mib, self.limits.vocab_size
        if not room:
            raise UsageError("this server has no room for automata; start it with --constraint-mib 64")
        text, tokenizer = constraint.text, self.tokenizer
        try:
            if constraint.kind == "tools":
                pattern = pattern_of_calls(text, form_of(tokenizer))
                automaton = compile_pattern(pattern, tokenizer, None, "the call", SECONDS, is_valid=True)
            else:
                make = json_schema if constraint.kind == "json" else regex
                automaton = make(text, tokenizer, seconds=SECONDS)
        except RecursionError:
            raise UsageError("the JSON schema has too many levels; use fewer") from None
        check_room(automaton, room, vocab, "--constraint-mib")
        return automaton
