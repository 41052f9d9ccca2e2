"""Diffusion methods: `make(denoiser, **options)` is the procedure that `specjax.diffusion.denoise` takes.

A table written by hand; a test checks that every file of `specjax.diffusion.methods` is in it and that options and
defaults are those of its function.
"""

from __future__ import annotations

from typing import Any

from specjax.catalog.method import Method
from specjax.catalog.options import Option, numbers, yes_or_no
from specjax.diffusion import methods
from specjax.diffusion.rules.quota import MEASURES
from specjax.diffusion.types import Denoiser, Procedure
from specjax.errors import UsageError
from specjax.types import Guarantee


def _row(
    make: Any, guarantee: Guarantee, summary: str, paper: str, *options: Option, **more: Any
) -> Method:  # fmt: skip
    return Method(make.__name__, "diffusion", make, guarantee, summary, paper, options=options, **more)


BLOCK = Option("block", int, 32, "columns of a block, of models with full attention")
STEPS = Option("steps", int, None, "passes for a block; default: one for each column")
EPS = Option("eps", float, 1e-3, "last time of the grid")


def tau(default: float) -> Option:
    return Option("tau", float, default, "confidence from which on a column is decided")


DIFFUSION: dict[str, Method] = {
    method.name: method
    for method in (
        _row(
            methods.llada,
            "definition",
            "blocks from left to right, the surest columns first, a fixed share per pass",
            "Nie et al. 2025, arXiv 2502.09992",
            BLOCK,
            STEPS,
            Option("by", tuple(MEASURES), "confidence", "what ranks columns"),
            Option("guidance", float, 0.0, "how far to move away from what the model says without the prompt"),
        ),
        _row(
            methods.sdar,
            "lossy",
            "block-causal models: every column of a block that is sure enough, at least its share",
            "Cheng et al. 2025, arXiv 2510.06303",
            tau(0.85),
            STEPS,
            Option("remasking", ("dynamic", "static", "sequential"), "dynamic", "which columns a pass decides"),
            Option("fuse", yes_or_no, True, "read a finished block in the first pass over the next"),
        ),
        _row(
            methods.fast_dllm,
            "lossy",
            "every column that is sure enough, or as many as can be sure together",
            "Wu et al. 2025, arXiv 2505.22618",
            BLOCK,
            Option("rule", ("threshold", "factor"), "threshold", "what is sure enough"),
            tau(0.9),
            Option("factor", float, 0.75, "of the rule factor"),
            Option("memory", ("exact", "dual", "prefix"), "exact", "what is not computed anew in every pass"),
        ),
        _row(
            methods.freedave,
            "identical",
            "looks at the next steps of llada at once and keeps those that it would have taken one by one",
            "Wu and Zhang 2025, arXiv 2510.00294",
            BLOCK,
            STEPS,
            Option("by", tuple(MEASURES), "confidence", "what ranks columns"),
            Option("drafts", int, 4, "canvases that a pass looks at"),
        ),
        _row(
            methods.linear_spec,
            "distribution",
            "block-causal models: drafts a block in one pass and judges it as the autoregressive model that it is",
            "SGLang, Nemotron-Labs-Diffusion 2026",
        ),
        _row(
            methods.credit_decoding,
            "lossy",
            "tokens that were likeliest in passes before are surer now",
            "Wang et al. 2025, arXiv 2510.06133",
            BLOCK,
            tau(0.8),
            Option("alpha", float, 0.7, "what credit adds to a logit, times log(1 + credit)"),
            Option("beta", float, 0.8, "what is left of credit after a pass"),
            Option("gamma", float, 0.2, "power of the probability that is credited"),
            Option("slots", int, 8, "tokens of a column that have credit; 0: all"),
        ),
        _row(
            methods.ccd,
            "lossy",
            "columns that were good candidates in the pass before, too, with the same word",
            "Chen et al. 2025, arXiv 2512.02044",
            BLOCK,
            Option("candidates", int, 5, "columns that a pass may name"),
            Option("warmup", int, 5, "first passes of a block that decide one column"),
            Option("dynamic", yes_or_no, True, "decide all coherent columns, not one"),
        ),
        _row(
            methods.eoser,
            "lossy",
            "ends of a text are decided late; with ascending, 1, 2, 4 ... columns a pass",
            "Yang et al. 2025, arXiv 2509.23924",
            Option("block", int, None, "columns of a block, of models with full attention; default: all new ones"),
            STEPS,
            Option("ascending", yes_or_no, False, "1, 2, 4 ... columns a pass"),
            Option("parts", int, 1, "blocks of ascending passes"),
            Option("least", float, None, "what the confidence of an end is multiplied by in the first pass"),
            Option("most", float, 1.0, "and in the last one"),
        ),
        _row(
            methods.adablock,
            "lossy",
            "blocks that end where the model says that a line does, decided by the threshold rule",
            "Lu et al. 2025, arXiv 2509.26432",
            BLOCK,
            tau(0.9),
            Option("delimiters", numbers, (198,), "tokens that may end a block"),
            Option("delimiter_tau", float, 0.3, "confidence from which on one does"),
            Option("ahead", int, 128, "columns that are looked through for one"),
        ),
        _row(
            methods.prophet,
            "lossy",
            "once the model is sure of the answer, all of the canvas at once",
            "Li et al. 2025, arXiv 2508.19982",
            BLOCK,
            STEPS,
            Option("early", float, 7.5, "gap of logits that is enough in the first third of the passes"),
            Option("middle", float, 5.0, "in the second"),
            Option("late", float, 2.5, "in the last"),
        ),
        _row(
            methods.llada21,
            "lossy",
            "decided columns may be changed again until their block is finished",
            "Bie et al. 2026, arXiv 2602.08676",
            BLOCK,
            tau(0.95),
            Option("edit_tau", float, 0.9, "probability above which a decided column is changed"),
            Option("post_steps", int, 16, "passes over a full block"),
        ),
        _row(
            methods.learn2pd,
            "lossy",
            "what a tiny trained filter holds to be right already, and nothing behind the end of the text",
            "Bao et al. 2025, arXiv 2509.25188",
            Option("theta", float, 0.96, "opinion of the filter above which a column is decided"),
            Option("eotp", yes_or_no, True, "end the text with the first column that ends it"),
            needs=frozenset({"filter"}),
        ),
        _row(
            methods.constraint,
            "valid",
            "texts of a regular language, of which an automaton is given; by the threshold rule",
            "Mündler et al. 2025, arXiv 2508.10111",
            BLOCK,
            tau(0.9),
            needs=frozenset({"automaton"}),
        ),
        _row(
            methods.iter_smooth,
            "lossy",
            "open columns are shown mixed with what the model said of them in the pass before",
            "Ma et al. 2025, arXiv 2510.08666",
            BLOCK,
            tau(0.9),
            Option("first", float, 0.15, "share of that in the first pass that has any"),
            Option("step", float, 0.02, "by how much it grows, and the threshold falls, in each pass"),
            Option("most", float, 0.3, "largest share"),
            Option("words", int, 8, "tokens of a column that are mixed in"),
        ),
        _row(
            methods.dream,
            "definition",
            "no blocks: a grid of times says how many columns, one of four scores which",
            "Ye et al. 2025, arXiv 2508.15487",
            Option("alg", ("origin", "maskgit_plus", "topk_margin", "entropy"), "origin", "what chooses columns"),
            Option("steps", int, None, "steps of the grid; default: one for each column"),
            EPS,
            Option("alg_temp", float, 0.0, "how much chance has a say in which columns are chosen"),
        ),
        _row(
            methods.entropy_bound,
            "lossy",
            "the most certain columns, as many as have little entropy together",
            "Cheng et al. 2025, arXiv 2510.06303",
            BLOCK,
            Option("gamma", float, 0.35, "nats that a pass may decide"),
            Option("own", yes_or_no, True, "whether a column's own entropy counts, or only that of those before it"),
        ),
        _row(
            methods.fast_dllm_pp,
            "lossy",
            "as many columns as are the likeliest together under any dependence between them",
            "Kasa et al. 2026, arXiv 2606.02955",
            BLOCK,
            Option("delta", float, 0.25, "by how much what is taken must be likelier than the rest"),
        ),
        _row(
            methods.dimple,
            "lossy",
            "every column that is sure enough, else the next share by a grid of times; the prompt is read once",
            "Yu et al. 2025, arXiv 2505.16990",
            Option("gamma", float, 0.95, "confidence above which a column is decided"),
            Option("steps", int, None, "passes at most; default: one for each column"),
            EPS,
            Option("prefill", yes_or_no, True, "read the prompt once, of models with full attention"),
        ),
        _row(
            methods.local_leap,
            "lossy",
            "every column that is sure enough, where less is enough next to one that is",
            "Kong et al. 2025, arXiv 2510.07081",
            BLOCK,
            tau(0.9),
            Option("near", float, 0.75, "confidence that is enough next to a column that is sure"),
            Option("radius", int, 4, "columns that count as next to one"),
        ),
        _row(
            methods.dparallel,
            "lossy",
            "every column of little entropy, for models that were made certain by distillation",
            "Chen et al. 2025, arXiv 2509.26488",
            BLOCK,
            Option("eta", float, 0.5, "entropy in nats up to which a column is decided"),
        ),
        _row(
            methods.r2_dllm,
            "lossy",
            "every column that is sure enough, and what is redundant in place or in time",
            "Du et al. 2026, arXiv 2604.18995",
            BLOCK,
            tau(0.9),
            Option("cluster", float, 0.8, "mean confidence of three columns in a row that is enough"),
            Option("repeat", float, 0.8, "confidence of the surest of columns with one token that is enough"),
            Option("steady", float, 0.8, "confidence that is enough where the token stayed the same"),
            Option("times", int, 3, "passes for which it must stay the same"),
            Option("over", ("last", "mean", "max"), "last", "which of their confidences counts"),
        ),
        _row(
            methods.fast_dllm_v2,
            "lossy",
            "seeded block-causal models: sub-blocks from left to right, every column that is sure enough",
            "Wu et al. 2025, arXiv 2509.26328",
            tau(0.9),
            Option("sub_block", int, None, "its columns; default: 8, or the block if 8 does not divide it"),
            Option("top_p", float, 0.95, "mass of the nucleus that confidences are shares of"),
        ),
        _row(
            methods.s2d2,
            "distribution",
            "block-causal models: drafts a block in one pass and judges it by itself with blocks of one",
            "Han et al. 2026, arXiv 2603.25702",
        ),
        _row(
            methods.s2d2_routed,
            "lossy",
            "as sdar; where a router expects it to pay, drafts are judged by the model with blocks of one",
            "Han et al. 2026, arXiv 2603.25702",
            Option("router", ("always", "span", "score", "hysteresis", "bandit"), "score", "when drafts are verified"),
            tau(0.85),
            STEPS,
            Option("chance", ("entropy", "margin"), "entropy", "what the chance of a draft is estimated by"),
            Option("beta", float, 1.0, "power of the chance by entropy"),
            Option("dynamic", yes_or_no, False, "cost counts for each column that is sure enough"),
            Option("cost", float, 1.0, "what the expected tokens must make up for"),
            Option("above", float, 0.0, "score above which drafts are verified"),
            Option("below", float, -5.0, "of hysteresis, score below which they no longer are"),
            Option("least", int, 2, "of span, open columns in a row"),
        ),
        _row(
            methods.dkv_cache,
            "lossy",
            "as llada; what is decided is computed once more, in the pass after, and then kept",
            "Ma et al. 2025, arXiv 2505.15781",
            BLOCK,
            STEPS,
            Option("by", tuple(MEASURES), "confidence", "what ranks columns"),
            Option("refresh", int, 8, "passes over a block after which the whole canvas is computed again"),
            Option("suffix", ("frozen", "fresh"), "frozen", "what open columns behind the block are"),
        ),
        _row(
            methods.window_diffusion,
            "lossy",
            "far columns are not seen, near ones kept for some passes, and the first few open ones decided",
            "arXiv 2601.20332",
            Option("outer", int, 64, "open columns that are seen"),
            Option("inner", int, 16, "those of them that may be decided"),
            Option("refresh", int, 32, "passes for which the others are kept"),
            Option("tau", float, None, "confidence from which on a column is decided; default: one a pass"),
            Option("early", yes_or_no, False, "end the text with the first column that ends it"),
        ),
        _row(
            methods.ete,
            "lossy",
            "every column that is sure enough; where these are few, tries words for an uncertain one",
            "arXiv 2511.21103",
            Option("block", int, 32, "columns of a block"),
            tau(0.9),
            Option("ahead", int, 1, "blocks behind it that are decided, too"),
            Option("least", int, 2, "columns below which a pass explores"),
            Option("words", int, 2, "words that it tries"),
            Option("gain", float, 0.1, "nats that a column is worth which a word makes sure"),
        ),
    )
}


def procedure_of(method: str | Procedure, denoiser: Denoiser, **options: Any) -> Procedure:
    """The procedure of a method by name, or itself.

    Raises: UsageError for an unknown name, or options that the method does not have.
    """
    if isinstance(method, Procedure):
        if options:
            raise UsageError(
                f"{next(iter(options))} is of a method by name; give it to the one that made this procedure"
            )
        return method
    if method not in DIFFUSION:
        raise UsageError(f'unknown diffusion method "{method}"; choose one of {", ".join(DIFFUSION)}')
    known = [*DIFFUSION[method].needs, *(option.name for option in DIFFUSION[method].options)]
    wrong = [name for name in options if name not in known]
    if wrong:
        raise UsageError(f"method {method} has no option {wrong[0]}; it has {', '.join(known) or 'none'}")
    return DIFFUSION[method].make(denoiser, **options)
