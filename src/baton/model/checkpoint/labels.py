"""The labels of a model that scores texts, and what makes results of its scores: as vLLM reads them."""

from __future__ import annotations

from typing import Final, Literal

from baton.model.description.fields import Fields

Activation = Literal["identity", "sigmoid", "softmax"]
MAX_LABELS: Final = 1 << 16
_TRAINED_FOR: Final[dict[str, Activation]] = {
    "regression": "identity",
    "multi_label_classification": "sigmoid",
}
"""By `problem_type`."""
_MODULES: Final[dict[str, Activation]] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""Of torch, as sentence-transformers names them for its CrossEncoder."""


def read_labels(fields: Fields) -> tuple[str, ...]:
    """`id2label`, which is not saved where there are two that have no names.  Raises `UnsupportedModel`."""
    given = fields.object("id2label")
    count = len(given) or fields.integer("num_labels", 2, most=MAX_LABELS)
    if not given:
        return tuple(f"LABEL_{number}" for number in range(count))
    if set(given) != {str(number) for number in range(count)} or not all(
        isinstance(name, str) for name in given.values()
    ):
        raise fields.refused(f"id2label must give texts for the numbers 0 to {count - 1}")
    if count > MAX_LABELS:
        raise fields.refused(f"id2label has {count} labels; Baton serves up to {MAX_LABELS}")
    return tuple(given[str(number)] for number in range(count))


def read_activation(fields: Fields, count: int) -> Activation:
    """What the model was trained for, else a sigmoid for one label, and a softmax over several.  Raises
    `UnsupportedModel`."""
    kind = fields.text("problem_type") or ""
    usual: Activation = "sigmoid" if count == 1 else "softmax"
    if kind:
        return _TRAINED_FOR.get(kind, usual)
    within = fields.within("sentence_transformers").text("activation_fn")
    name = within or fields.text("sbert_ce_default_activation_function")
    if name is None:
        return usual
    last = name.rpartition(".")[2]
    if last not in _MODULES:
        known = ", ".join(_MODULES)
        raise fields.refused(f"its scores go through {name[:60]!r}; Baton knows {known} of torch.nn")
    return _MODULES[last]
