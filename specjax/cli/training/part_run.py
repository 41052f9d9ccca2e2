"""The run of `specjax train` for trained parts of methods: probes, routers, decision heads and changed models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specjax.cli.options.common import parse_flag
from specjax.cli.options.groups import ModelOptions
from specjax.cli.output.console import Console, print_json
from specjax.cli.runs.collaboration.words import STEP_ENDS, load_rewards
from specjax.cli.runs.environment import stage
from specjax.cli.runs.session import Session, check_vocabularies, open_denoiser, open_session, provenance
from specjax.cli.training.files import SourceFile, list_sources
from specjax.cli.training.observer import ConsoleObserver
from specjax.cli.training.setting_flags import in_flags
from specjax.collaborate import after_strings
from specjax.errors import UsageError, require
from specjax.models import loading
from specjax.models.loading.reward_models import is_reward_folder
from specjax.persistence.cards import write_card
from specjax.training.data.corpus import CorpusBuilder, CorpusSettings
from specjax.training.data.judged_files import to_judged
from specjax.training.parts import PARTS, PartJob, PartResult
from specjax.types import Target


@dataclass(frozen=True)
class PartFlags:
    """The parsed flags of a run."""

    kind: str
    options: Mapping[str, Any]
    prompts: Sequence[SourceFile]
    texts: Sequence[SourceFile]
    judged: Sequence[Mapping[str, Any]]
    values: Any  # the other flags by name


def run_part(flags: PartFlags, models: ModelOptions, *, as_json: bool) -> None:
    """Load the models, train the part, and print the result."""
    log, out = Console(stderr=True), flags.values.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {out} cannot be written ({error.strerror}); give another folder") from error
    denoiser = None
    if PARTS[flags.kind].denoises:
        session, denoiser = open_denoiser(log, models)
    else:
        session = open_session(log, models)
    require(
        session.formats is None or not PARTS[flags.kind].changes_target,
        f"--method {flags.kind} trains the weights of the target, and {session.target.model.name} has quantised ones; "
        "leave --quantize out, and give --no-keep-quantized for a quantised file",
    )
    with in_flags():
        job = dataclasses.replace(make_job(flags, session, log), denoiser=denoiser)
        with stage(log, f"training {flags.kind}", f"trained {flags.kind}") as clock:
            result = PARTS[flags.kind].train(job)
    card = provenance(session) | {
        "method": flags.kind, "options": _plain(flags.options), "seed": job.seed, "seconds": clock.seconds,
        "texts": max(len(job.texts), len(job.prompts), len(job.judged)), "flags": result.flags, **result.numbers,
    }  # fmt: skip
    write_card(out, card)
    if as_json:
        print_json(card)
    else:
        _print(flags, result, models, Console())


def _print(flags: PartFlags, result: PartResult, models: ModelOptions, out: Console) -> None:
    shown = {name: str(x) if isinstance(x, int) else f"{x:.4g}" for name, x in result.numbers.items()}
    numbers = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())
    out.print(f"{flags.kind}: {numbers or 'trained'}", soft_wrap=True)
    target = "" if "--target" in result.flags or models.target is None else f" --target {models.target}"
    draft = "" if "--draft " in result.flags or models.draft is None else f" --draft {models.draft}"
    out.print(f"specjax generate ...{target}{draft} {result.flags}", soft_wrap=True, markup=False)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def make_job(flags: PartFlags, session: Session, log: Console) -> PartJob:
    """Return the inputs of a training run. Missing responses are generated first."""
    values, part, tokenizer = flags.values, PARTS[flags.kind], session.tokenizer
    settings = CorpusSettings(
        0, values.max_new_tokens, values.temperature, values.own_prompts, values.batch_size, values.length,
        values.seed, session.target.model.max_positions, values.system,
    )  # fmt: skip
    inputs = _make_inputs(flags, session)
    prompts, texts = list_sources(flags.prompts, log), list_sources(flags.texts, log)
    observer = ConsoleObserver(log)
    builder = CorpusBuilder(
        session.target, tokenizer, settings, values.answers or values.out / "answers", observer, writes=True
    )
    data: dict[str, Any] = {}
    if part.data == "judged":
        data["judged"] = [to_judged(dict(entry), tokenizer, values.system) for entry in flags.judged]
    elif part.data == "prompts":
        dialogues = builder.select_prompts(prompts, has_texts=False)
        data["prompts"] = [dialogue.next_prompt(tokenizer) for dialogue in dialogues]
    else:
        data["texts"] = builder.read_texts(texts) if flags.texts else builder.build(prompts, ()).texts
    observer.close()
    names = ("max_new_tokens", "temperature", "batch_size", "rows", "length", "epochs", "seed", "learning_rate")
    return PartJob(
        session.target, values.out, flags.options, **data, draft=session.draft, tokenizer=_tokenizer_of(values),
        inputs=inputs, **{name: getattr(values, name) for name in names},
    )  # fmt: skip


def _tokenizer_of(values: Any) -> Any:
    """Return the tokenizer to write beside a changed model: the files of its source, if that is a folder."""
    source = loading.resolve(values.target)
    return source if source.is_dir() else loading.load_tokenizer(values.target)


def _make_inputs(flags: PartFlags, session: Session) -> dict[str, Any]:
    """Return the arguments of Arbitrage's training that flags name: the reward, the steps, and the router's model."""
    if flags.kind != "arbitrage":
        return {"eos": session.tokenizer.eos}
    options = {name: value for name, value in flags.options.items() if value is not None}
    rewards = load_rewards({name: value for name, value in options.items() if name.startswith("reward")}, session)
    source = options.get("router")
    router = (
        session.draft
        if source is None
        else parse_flag("--set router", lambda name: _load_router(name, session), source)
    )
    ends = after_strings(
        options.get("steps") or STEP_ENDS["arbitrage"], session.tokenizer, session.target.model.vocab_size
    )
    return {
        "reward": rewards["reward"], "segmenter": ends, "router_model": router, "eos": session.tokenizer.eos,
        "router_source": source or flags.values.draft,
    }  # fmt: skip


def _load_router(source: str, session: Session) -> Target:
    """Load the model below a router's head: a reward model, or any other."""
    kind: Any = "reward" if is_reward_folder(loading.resolve(source)) else "autoregressive"
    loaded = loading.read_model(source, kind=kind, dtype=session.dtype)
    check_vocabularies(session.tokenizer, loaded.tokenizer, "--set router")
    return loaded.target
