"""The processes that tests/parallel runs: `host_worker.py MODE ...`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
import time

TESTS = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "lib"), str(TESTS / "catalog")]

ROWS = [[i + 1, 2, 3, i + 1, 2, 3, i + 1][:n] for i, n in enumerate((5, 1, 7, 2, 3, 6, 4))]  # uneven: 7 rows
OPTIONS = {"max_new_tokens": 12, "temperature": 0.8, "eos": (3,), "sampling": "coupled"}


def arrays():
    """(tokens, lengths), keys, whole."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    tokens = np.zeros((len(ROWS), 7), np.int32)
    for place, row in zip(tokens, ROWS, strict=True):
        place[: len(row)] = row
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(len(ROWS)))
    return (tokens, np.array([len(row) for row in ROWS], np.int32)), keys


def drafter_of(name: str):
    """A method with the options of the conformance suite, or of the tests of drafters with a denoiser."""
    import test_methods
    import toy_denoisers
    from toy import tiny_llama

    from specjax import make_drafter

    if name in test_methods.METHODS:
        return test_methods.drafter_of(name)
    return make_drafter(name, tiny_llama(), toy_denoisers.causal(), **toy_denoisers.SMALL[name])


def methods(address: str, count: str, host: str, *names: str) -> None:
    """Text and sums of methods, of `decode` and (of the first) of `stream`."""
    parallel = join(address, count, host)
    from toy import tiny_llama

    import specjax

    mesh = parallel.mesh(2 * int(count), 1)
    target = tiny_llama()
    target = specjax.Target(target.model, parallel.place(target.params, mesh))
    host_arrays, keys = arrays()
    rows, keys = parallel.spread_rows(mesh, *host_arrays, keys)
    for name in names:
        drafter = drafter_of(name)
        drafter = drafter.replace(params=parallel.place(drafter.params, mesh))
        result = specjax.decode(target, drafter, rows, key=keys, **OPTIONS)
        texts = parallel.gather(result).to_lists()
        streamed = None
        if name == names[0]:
            streamed = [[] for _ in texts]
            for step in specjax.stream(target, drafter, rows, key=keys, **OPTIONS):
                for row, new in zip(streamed, step.tokens, strict=True):
                    row += new
            try:
                result.to_lists()
            except specjax.UsageError as error:
                print("refused:", error)
        print(json.dumps({"name": name, "texts": texts, "streamed": streamed}), flush=True)


def rounds(address: str, count: str, host: str, failing: str = "none") -> None:
    """Decode for ever, or until one host raises."""
    parallel = join(address, count, host, heartbeat=6)
    from toy import tiny_llama

    import specjax

    mesh = parallel.mesh(2 * int(count), 1)
    target = specjax.shard(tiny_llama(), mesh)
    host_arrays, keys = arrays()
    rows, keys = parallel.spread_rows(mesh, *host_arrays, keys)
    for number in range(10**9):
        result = specjax.decode(target, "autoregressive", rows, key=keys, max_new_tokens=200)
        parallel.gather(result)
        print("round", number, flush=True)
        if number == 2 and host == failing:
            raise ValueError("this host has no room left")
        if number == 2 and failing == f"exit {host}":
            sys.exit(5)
        if number == 2 and failing == f"caught {host}":
            with contextlib.suppress(SystemExit):
                sys.exit(5)
            time.sleep(600)


def library(address: str, count: str, host: str) -> None:
    """Calls whose prompts or keys differ, and requests that arrive at other times on each host."""
    parallel = join(address, count, host)

    from toy import tiny_llama

    import specjax

    target = specjax.shard(tiny_llama(layers=1), parallel.mesh(1, 2 * int(count)))
    host_number = int(host) + 1
    for prompts, key in (([[1, host_number]], 0), ([[1, 2]], host_number), ([[1, 2]], 0)):
        try:
            result = specjax.decode(target, "autoregressive", prompts, key=key, max_new_tokens=4)
            print("text:", parallel.gather(result).to_lists(), flush=True)
        except specjax.UsageError as error:
            print("refused:", error, flush=True)

    def requests():
        for number in range(4):
            time.sleep(0.3 * host_number * (number % 2))
            yield specjax.Request([1, 2, number], number)

    texts: dict[int, list[int]] = {}
    source = specjax.arrivals(requests())
    for news in specjax.serve(target, "prompt_lookup", source, slots=2, longest_prompt=4, max_new_tokens=6):
        texts[news.request] = texts.get(news.request, []) + news.tokens
    print("served:", json.dumps(texts), flush=True)
    try:
        requests = [specjax.Request([host_number], 0)]
        list(specjax.serve(target, "prompt_lookup", requests, slots=2, longest_prompt=4, max_new_tokens=6))
    except specjax.UsageError as error:
        print("refused:", error, flush=True)


def training(address: str, count: str, host: str, folder: str, epochs: str) -> None:
    """Losses of a head that all hosts train, and what it serves; kept in the folder, where it goes on."""
    parallel = join(address, count, host)
    from training_runs import head_of, recipe, target, texts

    import specjax
    from specjax.training import measure_acceptance, train

    spread = specjax.shard(target(), parallel.mesh(int(count), 2))
    losses: list[float] = []
    fitted = train(
        spread, head_of("eagle3"), texts(), recipe=recipe(), held_out=texts(), epochs=int(epochs), rows=4, length=32,
        evaluate_every=2, folder=folder, on_progress=lambda progress: losses.append(progress.loss),
    )  # fmt: skip
    acceptance = measure_acceptance(spread, fitted, texts(), depths=3, rows=4, length=32)
    print(json.dumps({"losses": losses, "served": acceptance}), flush=True)


def cli(*arguments: str) -> None:
    """The command line on the tiny model of tests/cli."""
    import jax

    import specjax
    from specjax.cli import main

    conftest = load_conftest()

    def load(
        source=None, *, dtype="float32", stacked=None, cache_dtype=None, same_bits=False, max_positions=None, mesh=None,
        over=None, quantize=None, keep_quantized=None,
    ):  # fmt: skip
        config = dataclasses.replace(conftest.CONFIG, cache_dtype=cache_dtype)
        if source == "missing":
            if jax.process_index() == 1:
                raise specjax.UsageError("there is no such file on this host")
            source = None
        target = conftest.make_target(config, seed=int(source == "draft"))
        return target if mesh is None else specjax.shard(target, mesh, over), conftest.ByteTokenizer()

    specjax.load = load
    main(arguments)  # one that reads `sys.argv` may end the process of the tests at once


def of_version(version: str, *arguments: str) -> None:
    """The command line of another release."""
    from specjax.parallel import hosts

    hosts.__version__ = version
    cli(*arguments)


def save_for_ever(folder: str) -> None:
    """Checkpoints of a run, one after the other: to be killed while it writes."""
    import numpy as np

    from specjax import persistence
    from specjax.persistence.running import Running
    from specjax.types import DecodeState

    running = Running(persistence.Checkpoints(folder, 1), {"prompts": "a"})
    for step in range(10**9):
        rows = np.full((4,), step, np.int32)
        tokens, cache = np.full((4, 8), step, np.int32), np.full((1 << 20,), step, np.int32)
        state = DecodeState(tokens, rows, rows < 0, rows, rows, cache, (), (), rows < 0)
        running.save(step, state, rows)
        print("saved", step, flush=True)


def load_conftest():
    from scripts import module_at  # where the path says

    return module_at(TESTS / "cli" / "conftest.py")


def join(address: str, count: str, host: str, heartbeat: float = 30):
    from specjax import parallel

    parallel.initialize(address, int(count), int(host), timeout=60, heartbeat=heartbeat)
    return parallel


if __name__ == "__main__":
    known = methods, rounds, library, training, cli, of_version, save_for_ever
    {function.__name__: function for function in known}[sys.argv[1]](*sys.argv[2:])
