"""From a float model and data to a calibrated model: plan, trace, prepare, calibrate, correct."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.calling.baking import as_written, bake, computes_weights
from x86quant.calling.call import Call
from x86quant.calling.differences import difference
from x86quant.calling.running import feed_parts, has_floats, run, run_drawing
from x86quant.calling.state import copied, deep_copy, settle, state_kept
from x86quant.calling.wording import layers_stay, listed
from x86quant.capture.plain_numbers import plain_layers
from x86quant.capture.variants import takes, variants
from x86quant.dynamic import is_experts
from x86quant.dynamic.convert import has_hooks, is_linear, to_dynamic, why_float
from x86quant.errors import (
    InvalidInputError,
    UnsupportedError,
    X86QuantError,
    X86QuantWarning,
    first_line,
)
from x86quant.quantization.batches import Calibration, Data
from x86quant.quantization.channel_scales import Scaled, scale_channels
from x86quant.quantization.error_feedback import with_error_feedback
from x86quant.quantization.expert_linears import with_float_linears
from x86quant.quantization.kit.accuracy_kit import (
    Calibrated,
    calibrated_parts,
    smoothed_model,
    smoothing_helps,
    take_steps,
)
from x86quant.quantization.kit.equalization import Equalized
from x86quant.quantization.kit.halves import Halves
from x86quant.quantization.odd_data import (
    labels_among,
    unlike_training,
    what_are_labels,
    what_is_odd,
)
from x86quant.quantization.prepared import NamedLayer, PreparedModel
from x86quant.quantization.scheme import (
    TABLES,
    Scheme,
    check_model,
    decide,
    dynamic_layers,
    float_type,
    left_in_float,
)
from x86quant.quantization.settings import Settings
from x86quant.quantization.static.part_search import Parts, called_by, find_parts
from x86quant.quantization.static.static_part import Ranges, StaticPart
from x86quant.quantization.tracing.choices_by_value import places_before_choices, places_of_floats
from x86quant.quantization.tracing.float_results import FloatResults

_log = logging.getLogger("x86quant.quantization")


def prepare(model: nn.Module, calibration: Data | None, settings: Settings) -> PreparedModel:
    """A calibrated copy of ``model``.

    Raises:
        InvalidInputError: the model or the data are not what they should be.
        UnsupportedError: no part of the model can be quantized.
    """
    given = check_model(model)
    single = float_type(given) is not torch.float32
    scheme = decide(given, settings.mode)
    ranges = Ranges.of(settings)
    if calibration is None and scheme.static:
        raise InvalidInputError(
            f"{type(given).__name__} is quantized statically, which needs calibration data: "
            "a tensor, a DataLoader or an iterable of batches"
        )
    data = None
    if calibration is not None:
        data = Calibration(
            calibration,
            given,
            example_inputs=settings.example_inputs,
            single=single,
            show=settings.progress,
        )
    reference = as_written(copied(given)).eval()
    plain_layers(reference)
    if single:
        reference.float()
    exact = FloatResults(reference)
    if data is not None:
        first = _check_runs(reference, data.example, given=given)
        if first is not None:
            exact.note(data.example, *first)
        for odd in (
            *what_is_odd(data.sample),
            *what_are_labels(reference, data.sample),
            *unlike_training(reference, data.sample),
        ):
            warnings.warn(odd, X86QuantWarning, stacklevel=4)
    refused: dict[tuple[str, str], str] = {}
    while True:
        with failing_batches_named(reference, () if data is None else data.sample):
            prepared = _prepared(exact, scheme, data, ranges, settings, refused)
        failed = dict(_not_buildable(prepared))
        if not failed:
            return prepared
        assert data is not None
        refused |= failed
        data = Calibration(list(data.sample), given)


def _not_buildable(prepared: PreparedModel) -> Iterator[tuple[tuple[str, str], str]]:
    """The parts that cannot be converted, by path and way, each with the reason."""
    for part in prepared.parts:
        hooked = has_hooks(prepared.model.get_submodule(part.path))
        try:
            part.check_build(flat=part.needs_guard or hooked)
        except UnsupportedError as error:
            yield (part.path, part.traced.method), str(error)


def _check_runs(
    model: nn.Module, example: Call, which: str = "the first", given: nn.Module | None = None
) -> tuple[Any] | None:
    """The result for ``example``; None if another run may return another.

    Raises:
        InvalidInputError: the model does not run.
        UnsupportedError: the model does, but its copy does not.
    """
    try:
        (result, drawn), changes = settle(model, lambda: run_drawing(model, example, 0))
        return None if drawn or changes else (result,)
    except Exception as error:  # whatever the user's model raises at wrong inputs
        if given is not None and _runs(given, example):
            raise UnsupportedError(
                f"a copy of {type(given).__name__} by copy.deepcopy fails where the model itself "
                "runs, and quantize does not change the model it is given: a hook or a function "
                f"among its attributes refers to the original ({first_line(error)})"
            ) from error
        raise InvalidInputError(
            f"the float model fails on {which} calibration batch, of "
            f"{str(example) or 'no tensors'}: {first_line(error)}{labels_among(example)}"
        ) from error


def _runs(model: nn.Module, example: Call) -> bool:
    training = {module: module.training for module in model.modules()}
    try:
        with state_kept(model):
            run(model.eval(), example)
    except Exception:  # whatever the user's model raises
        return False
    finally:
        for module, mode in training.items():
            module.training = mode
    return True


@contextlib.contextmanager
def failing_batches_named(model: nn.Module, sample: Sequence[Call]) -> Iterator[None]:
    """A block in which ``model`` runs: if that fails on a batch of ``sample``, the error says so.

    Raises:
        InvalidInputError: what failed in the block was that the model does not take a batch.
    """
    try:
        yield
    except X86QuantError:
        raise
    except Exception:
        for call in sample:
            _check_runs(model, call, "a")
        raise


def _prepared(
    exact: FloatResults,
    scheme: Scheme,
    data: Calibration | None,
    ranges: Ranges,
    settings: Settings,
    refused: MutableMapping[tuple[str, str], str],
) -> PreparedModel:
    reference = exact.model
    model = _baked(reference, data)
    sample = () if data is None else data.sample
    halves = Halves.of_rows(exact, sample) if sample else Halves((), ())
    notes: list[str] = []
    if settings.embedding_bits is not None:
        model, told = _with_tables(model, settings.embedding_bits)
        notes += told
    plain = model
    model, smoothed = smoothed_model(plain, scheme, halves, settings)
    # A plain copy returns what the reference does.
    is_copy = settings.embedding_bits is None and not any(
        computes_weights(m) for m in reference.modules()
    )
    of_plain = exact.of_copy(plain) if is_copy else FloatResults(plain)
    own = FloatResults(model) if smoothed else of_plain
    equalized: tuple[Equalized, ...] = ()
    parts: tuple[StaticPart, ...] = ()
    batches = 0
    if scheme.static:
        assert data is not None
        # Other batches show by a few rows what is different there.
        shown = (sample[0], *halves.calls[1:]) if halves.pieces > 1 else sample
        tried = variants(shown, functools.partial(takes, model))
        found = find_parts(own, scheme, tried, ranges, refused)
        halves = _within(found, halves, sample)
        if smoothed and found.found and settings.smooth_quant == "auto":
            before = find_parts(of_plain, scheme, tried, ranges, refused)
            if not smoothing_helps((of_plain, before), (own, found), ranges, halves):
                model, own, found, smoothed = plain, of_plain, before, ()
        notes += found.notes
        if not found.found and not scheme.dynamic:
            _refuse_tables_alone(reference, settings)
            raise UnsupportedError(
                f"no part of {type(model).__name__} can be quantized statically"
                + "".join(f": {note}" for note in notes)
            )
        paths = [part.path for part in found.found]
        _choose_places(exact, own, paths, scheme, sample[0], notes)
        with state_kept(model):
            ranges, parts, equalized = calibrated_parts(own, found, ranges, halves, settings)
            batches = _calibrate_further(model, parts, data, halves)
            take_steps(Calibrated(own, parts, halves, settings))
    elif sample:
        _choose_places(exact, own, (), scheme, sample[0], notes)
    layers = {layer.name: layer for layer in _layers(model, scheme, parts, sample, notes)}
    if not layers:
        _refuse_tables_alone(reference, settings)
        raise UnsupportedError(
            f"{type(model).__name__} has no layer that mode {scheme.mode!r} can turn into int8"
            + "".join(f"; {note}" for note in notes[-2:])
            + _what_else(model, scheme)
        )
    weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    scaled: tuple[Scaled, ...] = ()
    if settings.narrow_bits < 8 and scheme.dynamic and sample:
        modules = {x.name: model.get_submodule(x.name) for x in layers.values() if x.part is None}
        linears = [name for name, module in modules.items() if is_linear(module)]
        with state_kept(model):
            if settings.smooth_quant is not False:
                scaled = scale_channels(model, linears, sample, settings.narrow_bits)
            experts = [name for name, module in modules.items() if is_experts(module)]
            spread, of_experts = with_float_linears(model, experts) if experts else (model, [])
            linears += of_experts
            weights = with_error_feedback(spread, linears, sample, settings.narrow_bits)
        notes.append(
            f"{len(weights)} of {len(linears)} linears have codes of {settings.narrow_bits} bits "
            "chosen by the data, with error feedback; the others round each weight by itself"
        )
        gained = {name for one in scaled for name in one.place.linears}
        notes.append(
            f"{len(gained & {*linears})} of them have input channels that are scaled by how large "
            "they are, where these are made"
        )
    return PreparedModel(
        model=model,
        reference=reference,
        exact=exact,
        scheme=scheme,
        observer=ranges.observer,
        sample=sample,
        halves=halves,
        parts=parts,
        layers=layers,
        batches=batches,
        equalized=equalized,
        smoothed=smoothed,
        scaled=scaled,
        strict=settings.strict,
        weight_bits=settings.narrow_bits,
        weights=weights,
        notes=tuple(dict.fromkeys(notes)),  # several parts may have one and the same
    )


def _choose_places(
    exact: FloatResults,
    own: FloatResults,
    parts: Sequence[str],
    scheme: Scheme,
    call: Call,
    notes: list[str],
) -> None:
    """Choose where a model is judged, if not by its results, and say so."""
    model = own.model
    places = None
    if "" in parts:
        pass  # what is in it has no places of its own any more
    elif not has_floats(own.of(call)):
        places = places_of_floats(model, parts, call)
        why = "the model's own results hold no floating-point tensors"
    elif not scheme.dynamic:
        places = places_before_choices(model, parts, call)
        why = "the model chooses among it by its values"
    if places is not None:
        returns = "returns" if len(places.paths) == 1 else "return"
        note = f"judged by what {listed([*places.paths])} {returns}, since {why}"
        if places.behind:
            note += f"; of what gets the chosen nothing is known: {listed([*places.behind])}"
        notes.append(note)
    for results in (exact, own):
        results.judge_at(places)


def _refuse_tables_alone(model: nn.Module, settings: Settings) -> None:
    """Say what makes codes of ``model`` where all its weights are tables, and these were asked for.

    Raises:
        UnsupportedError: they are.
    """
    weights = {x for m in model.modules() if not isinstance(m, TABLES) for x in m._parameters}
    if settings.embedding_bits is not None and not weights:
        raise UnsupportedError(
            f"{type(model).__name__} has no weights but its tables', and embedding_bits is for "
            'tables beside int8 layers: mode="weight_only" without it makes rows of codes of them'
        )


def _what_else(model: nn.Module, scheme: Scheme) -> str:
    """What to do with ``model``, which has no int8 layer in ``scheme``."""
    if not scheme.weight_only and any(isinstance(m, TABLES) for m in model.modules()):
        return '; its tables are rows of codes with mode="weight_only"'
    return "; leave it in float, or quantize the model that it is a part of"


def _within(found: Parts, halves: Halves, sample: tuple[Call, ...]) -> Halves:
    """``halves`` of calls that run in int8: others run in float, and would flatter it."""
    if any(part.path and part.traced.guard.conditions for part in found.found):
        halves = Halves.of(sample)  # a graph may not hold for pieces of a batch
    whole = [part for part in found.found if not part.path]

    def held(calls: Sequence[Call]) -> tuple[Call, ...]:
        return tuple(x for x in calls if all(part.inputs(x) is not None for part in whole))

    if len(held(halves.calls)) == len(halves.calls):
        return halves
    return Halves.of(held(sample))


def _baked(reference: nn.Module, data: Calibration | None) -> nn.Module:
    """A copy of the model, its parametrized weights as plain ones where that is the same."""
    model = deep_copy(reference)
    computed = [m for m in model.modules() if computes_weights(m)]
    if data is None or not computed:
        return model
    try:
        for module in computed:
            bake(module)
        same = difference(run(reference, data.example), run(model, data.example)) is None
    except Exception as error:  # parametrizations are the user's own code
        _log.info("parametrizations stay: %s", first_line(error))
        same = False
    return model if same else deep_copy(reference)


def _with_tables(model: nn.Module, bits: int) -> tuple[nn.Module, list[str]]:
    """``model`` with its tables replaced, or what replaces it; what a user should know of it."""
    tables = {n: m for n, m in model.named_modules() if isinstance(m, TABLES)}
    model = to_dynamic(
        model, embeddings=bits, keep=lambda name, _: name not in tables, inplace=True
    )
    notes = []
    found = {name: model.get_submodule(name) for name in tables}
    by_bits: dict[int | None, list[str]] = {}
    for name, module in found.items():
        by_bits.setdefault(getattr(module, "bits", None), []).append(name)
    for own, names in by_bits.items():
        if own is None:
            why = why_float(tables[names[0]])
            notes.append(f"{len(names)} tables stay in float, because {why}: {listed(names)}")
        else:
            why = "" if own == bits else f", since rows do not fill bytes with codes of {bits}"
            notes.append(f"{len(names)} tables have rows in {own} bits{why}: {listed(names)}")
    return model, notes


def _calibrate_further(
    model: nn.Module, parts: Sequence[StaticPart], data: Calibration, halves: Halves
) -> int:
    """Show all that is left of the data to the observers; returns how many batches there were.

    They have seen the first half. The calls held back are shown last of those that are kept: what
    ranges would be without them is noted, and tells how well ranges do on data that they were not
    chosen by.
    """
    batches = len(data.sample)
    shown: list[Call] = []
    first_of_last = len(halves.calls) - len(halves.held_back)

    def counted() -> Iterator[Call]:
        nonlocal batches
        for number, call in enumerate(data.stream(halves.calls)):
            if halves.held_back and number == first_of_last:
                for part in parts:
                    part.note_ranges()
            batches += number >= len(halves.calls)
            if number >= len(halves.seen):
                shown[:] = [call]
                yield call

    try:
        feed_parts(model, counted(), {part: part.calibrate for part in parts})
    except Exception:
        for call in shown:
            _check_runs(model, call, "a")
        raise
    return batches


def _layers(
    model: nn.Module,
    scheme: Scheme,
    parts: Sequence[StaticPart],
    sample: Sequence[Call],
    notes: list[str],
) -> Iterator[NamedLayer]:
    for part in parts:
        for layer in part.layers:
            yield NamedLayer.of_part(part, layer)
    if not (scheme.dynamic or scheme.weight_only):
        return
    inside = tuple(f"{part.path}." for part in parts)
    left = {
        name: why
        for name, why in left_in_float(model, scheme).items()
        if not f"{name}.".startswith(inside)
    }
    for reason in dict.fromkeys(left.values()):
        names = [name or "the model's own" for name, why in left.items() if why == reason]
        notes.append(f"{layers_stay(names)} in float, because {reason}: {listed(names)}")
    candidates = {
        name: module
        for name, module in dynamic_layers(model, scheme)
        if not f"{name}.".startswith(inside)
    }
    called = None
    if sample:
        with state_kept(model):
            called = called_by(model, sample, candidates)
    differentiated, transformed = [], []
    unused: list[str] = []
    unreached: list[str] = []
    for name, module in candidates.items():
        if called is not None and name in called.differentiated:
            differentiated.append(name)
        elif called is not None and name in called.transformed:
            transformed.append(name)
        elif called is not None and name in called.read and not called.runs(name):
            unused.append(name)
        else:
            if called is not None and not called.runs(name):
                unreached.append(name)
            yield NamedLayer(name, type(module).__name__, None, name, name)
    if differentiated:
        notes.append(
            f"in float, because the model takes gradients through them: {listed(differentiated)}"
        )
    if transformed:
        notes.append(
            f"in float, because torch.func's transforms do not know int8: {listed(transformed)}"
        )
    if unused:
        notes.append(
            f"in float, because the model reads their weights instead of calling them: "
            f"{listed(unused)}"
        )
    if unreached:
        notes.append(
            "in int8, but not judged, because no call that was shown reaches them: "
            f"{listed(unreached)}"
        )
