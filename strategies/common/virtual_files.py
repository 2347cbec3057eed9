"""Files of a run's result for virtual data that the server made."""

from collections.abc import Callable
from io import BytesIO

from flwr_distill.distill.contact_sheet import contact_sheet
from flwr_distill.distill.features import are_vectors
from flwr_distill.distill.virtual_data import VirtualData


def virtual_files(payload: bytes, class_name: Callable[[int], str]) -> dict[str, bytes]:
    """Virtual data, and a picture of images, by file name; none if there are no data.

    `class_name` names a class by its label.
    """
    if not payload:
        return {}
    virtual = VirtualData.from_bytes(payload)
    if are_vectors(virtual.images.shape):
        return {"virtual.safetensors": virtual.to_safetensors()}
    names = [class_name(label) for label in range(int(virtual.labels.max()) + 1)]
    picture = BytesIO()
    sheet = contact_sheet(virtual.images, virtual.labels, names, virtual.formation)
    sheet.save(picture, format="png")
    return {"virtual.safetensors": virtual.to_safetensors(), "virtual.png": picture.getvalue()}
