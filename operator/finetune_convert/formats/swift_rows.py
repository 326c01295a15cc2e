"""Converts the dataset options of ms-swift."""

from typing import Any

from finetune_convert.conversion import ConversionError, EntryEffect
from finetune_convert.data_paths import is_path
from finetune_convert.formats.swift_options import DATASETS, EVALUATION_SETS, OVERLONG, SPLIT, get_first
from finetune_convert.mapping.converters import to_bool, to_float
from finetune_convert.mapping.trainer_conversion import TrainerConversion

ASSUMED_PACK_LENGTH = 4096


def uses_modelscope(swift: TrainerConversion) -> bool:
    """Return whether ids are those of ModelScope, which is the default of ms-swift."""
    variable = swift.source.environment.get("USE_HF")
    return not to_bool(swift.options.get("use_hf")) and not (variable and variable.text.lower() in ("1", "true"))


def add_model_hub(swift: TrainerConversion, name: str) -> None:
    """Set the hub of a model that is no folder; it is ModelScope by default."""
    if is_path(name):
        swift.note(("use_hf",), EntryEffect.UNUSED, "a folder belongs to no hub")
        return
    if not uses_modelscope(swift):
        swift.note(("use_hf",), EntryEffect.SAME, "ids are those of the Hugging Face Hub")
        return
    swift.draft.set("model.hub", "modelscope")
    if swift.options.has("use_hf"):
        swift.note(("use_hf",), EntryEffect.MAPPED, "ids are those of ModelScope", "model.hub")
    else:
        message = f"{swift.tool} reads ids from ModelScope"
        swift.draft.note("use_hf", EntryEffect.DEFAULT, message, field="model.hub")


def add_rows(swift: TrainerConversion) -> None:
    """Set training and evaluation rows, their length and their handling."""
    options, draft = swift.options, swift.draft
    training = [source for name in DATASETS for source in _split_names(options.get(name))]
    if not training:
        raise ConversionError("the command names no dataset; add --dataset")
    draft.set("dataset.train", [_build_source(swift, "dataset", name) for name in training])
    swift.note(DATASETS, EntryEffect.MAPPED, f"sources: {len(training)}", "dataset.train")
    evaluation = [source for name in EVALUATION_SETS for source in _split_names(options.get(name))]
    ratio = to_float(get_first(options, SPLIT) or 0)
    if evaluation:
        draft.set("dataset.eval", [_build_source(swift, "val_dataset", name) for name in evaluation])
        swift.note(EVALUATION_SETS, EntryEffect.MAPPED, f"sources: {len(evaluation)}", "dataset.eval")
        swift.note(SPLIT, EntryEffect.UNUSED, "there are separate evaluation rows")
    elif 0 < ratio < 1:
        draft.set("dataset.splitDatasetRatio", ratio)
        given = options.has(*SPLIT)
        swift.note(SPLIT, EntryEffect.TAKEN, "", "dataset.splitDatasetRatio")
        if not given:
            draft.note(
                SPLIT[0],
                EntryEffect.DEFAULT,
                f"the default of {swift.tool} is {ratio}",
                field="dataset.splitDatasetRatio",
            )
    else:
        swift.note((*EVALUATION_SETS, *SPLIT), EntryEffect.SAME, "no rows are held out")
    _add_lengths(swift)
    skip = not to_bool(options.get("strict"))
    draft.set("dataset.onBadRow", "skip" if skip else "error")
    if options.has("strict"):
        swift.note(
            ("strict",),
            EntryEffect.MAPPED,
            "invalid rows are skipped" if skip else "an invalid row fails the job",
            "dataset.onBadRow",
        )
    else:
        draft.note("strict", EntryEffect.DEFAULT, f"{swift.tool} skips invalid rows", field="dataset.onBadRow")


def _split_names(value: Any) -> list[str]:
    """Return the names of datasets; early versions separate them by commas."""
    names = value if isinstance(value, list) else [value] if value else []
    return [part for name in names for part in str(name).split(",") if part]


def _build_source(swift: TrainerConversion, option: str, name: str) -> dict[str, str]:
    """Return a source from [HF::|MS::]name[:subset[/subset]][#rows]."""
    line = swift.options.get_line(*(DATASETS if option == "dataset" else EVALUATION_SETS))
    requested = swift.source.request.datasets
    name, _, rows = name.partition("#")
    suffix = f"#{rows}" if rows.isdigit() and int(rows) > 0 else ""
    hub, separator, rest = name.partition("::")
    name = rest if separator else name
    subset = ""
    if not is_path(name):
        name, _, subset = name.partition(":")
    if name in requested:
        swift.draft.note(option, EntryEffect.MAPPED, f"{name} is {requested[name]}, as requested", line=line)
        return {"name": f"{requested[name]}{suffix}"}
    if is_path(name):
        return {"name": f"{swift.paths.place(option, name, line=line)}{suffix}"}
    if rows and not suffix:
        swift.draft.note(option, EntryEffect.CHANGED, f"#{rows} is not a number of rows", line=line)
    if "/" not in name:  # a short name of ms-swift, which is no id of a Hub
        source = {"name": f"{_replace_short_name(swift, option, name, line)}{suffix}"}
    else:
        source = {"name": f"{name}{suffix}"}
        if hub == "MS" if separator else uses_modelscope(swift):
            source["hub"] = "modelscope"
        _note_columns(swift, option, name, line)
    first, _, others = subset.partition("/")
    if first and first != "default":
        source["subset"] = first
    if others:
        swift.draft.note(
            option,
            EntryEffect.CHANGED,
            f"only the subset {first} of {subset} is taken; add a source for each",
            line=line,
        )
    return source


def _replace_short_name(swift: TrainerConversion, option: str, name: str, line: int | None) -> str:
    """Return the id on the Hugging Face Hub that the registry of ms-swift contains for a short name."""
    hub_id = swift.options.table.datasets.get(name)
    message = (
        f"{name} is {hub_id} on the Hugging Face Hub; ms-swift converts its columns: check them"
        if hub_id
        else f"{name} is no id of a hub: state its source with --dataset {name}=SOURCE"
    )
    swift.draft.note(option, EntryEffect.EDIT, message, line=line)
    return hub_id or name


def _note_columns(swift: TrainerConversion, option: str, name: str, line: int | None) -> None:
    if uses_modelscope(swift) or name in swift.options.table.datasets:
        message = f"ms-swift converts the columns of {name}: check them, or state another source with --dataset"
        swift.draft.note(option, EntryEffect.EDIT, f"{message} {name}=SOURCE", line=line)


def _add_lengths(swift: TrainerConversion) -> None:
    options, draft = swift.options, swift.draft
    packing = to_bool(options.get("packing")) and not swift.is_dpo
    length = options.get_first("packing_length", "max_length") if packing else options.get("max_length")
    length = max(0, int(to_float(length or options.get("max_length") or 0)))
    if length == 0 and packing:
        length = ASSUMED_PACK_LENGTH
        draft.note(
            "max_length",
            EntryEffect.EDIT,
            f"packs need a length, and the input has none; {ASSUMED_PACK_LENGTH} is assumed",
            field="dataset.maxLength",
        )
    if length > 0:
        draft.set("dataset.maxLength", length)
        swift.note(("max_length", "packing_length"), EntryEffect.TAKEN, "", "dataset.maxLength")
        if not options.has("max_length", "packing_length") and options.get("max_length"):
            draft.note(
                "max_length", EntryEffect.DEFAULT, f"the default of {swift.tool} is {length}", field="dataset.maxLength"
            )
    else:
        swift.note(("max_length", "packing_length"), EntryEffect.SAME, "the model's own limit")
    swift.add_packing("packing")
    strategy = options.get("truncation_strategy")
    overlong = OVERLONG.get(strategy)
    if overlong is None:
        draft.set("dataset.overlong", "truncate")
        swift.note(
            ("truncation_strategy",),
            EntryEffect.CHANGED,
            f"{strategy}: this trainer truncates at the end",
            "dataset.overlong",
        )
        return
    if overlong != "drop":
        draft.set("dataset.overlong", overlong)
    swift.note(("truncation_strategy",), EntryEffect.MAPPED, f"{strategy}: {overlong}", "dataset.overlong")
