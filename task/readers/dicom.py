"""DICOM images with one frame, shown as the file says: rescaled, windowed, MONOCHROME1 inverted.

Only elements that say how pixels are shown are read. What the file says of a person never gets into
memory, and errors repeat no text of the file.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any, BinaryIO

from flwr_distill.task.image_files import Picture, Stored, Treatment, check_size
from flwr_distill.task.readers import ImageReader, MissingPackageError, UnreadableImageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PREFIX = b"DICM"
PREAMBLE = 128
DEFLATED = "1.2.840.10008.1.2.1.99"
GREY = ("MONOCHROME1", "MONOCHROME2")
COLOURS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT", "PALETTE COLOR")
PALETTES = [
    f"{segmented}{colour}PaletteColorLookupTable{part}"
    for colour in ("Red", "Green", "Blue")
    for segmented, part in (("", "Descriptor"), ("", "Data"), ("Segmented", "Data"))
]
ELEMENTS = [
    *("SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames"),
    *("Rows", "Columns", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"),
    *("PixelData", "FloatPixelData", "DoubleFloatPixelData"),
    *PALETTES,
]


class Dicom(ImageReader):
    """Reads DICOM files with pydicom."""

    def recognises(self, file: BinaryIO) -> bool:
        """Whether the prefix follows the preamble."""
        return file.read(PREAMBLE + len(PREFIX))[PREAMBLE:] == PREFIX

    def inspect(self, file: BinaryIO) -> Stored:
        """Describe the image; pixels are not read."""
        with _without_texts():
            return _stored(_dataset(file, stop_before_pixels=True))

    def read(self, file: BinaryIO) -> Picture:
        """Decode the image, and show it as the file says."""
        stored = self.inspect(file)
        file.seek(0)
        with _without_texts():
            dataset = _dataset(file, stop_before_pixels=False)
            return Picture(_grey(dataset) if stored.is_grey else _colours(dataset), stored)


@contextmanager
def _without_texts() -> Iterator[None]:
    """Replace errors of pydicom, which repeat what a file says; its warnings are dropped."""
    try:
        from pydicom.config import disable_value_validation
    except ImportError as error:
        raise MissingPackageError("pydicom", "dicom") from error
    log = logging.getLogger("pydicom")
    disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings(action="ignore"), disable_value_validation():
            yield
    except UnreadableImageError:
        raise
    except Exception:  # a damaged file raises errors of many kinds
        raise UnreadableImageError("is a damaged DICOM file", remedy="export it again") from None
    finally:
        log.disabled = disabled


def _dataset(file: BinaryIO, *, stop_before_pixels: bool) -> Any:
    from pydicom import dcmread
    from pydicom.filereader import read_dataset

    file.seek(PREAMBLE + len(PREFIX))
    # pydicom would inflate a deflated file to any size.
    meta = read_dataset(file, False, True, stop_when=lambda tag, vr, length: tag >> 16 != 2)
    if meta.get("TransferSyntaxUID") == DEFLATED:
        raise UnreadableImageError("is a deflated DICOM file", remedy="convert it: dcmconv +te")
    file.seek(0)
    return dcmread(file, stop_before_pixels=stop_before_pixels, specific_tags=list(ELEMENTS))


def _stored(dataset: Any) -> Stored:
    """Describe an image, or raise UnreadableImageError if it cannot be shown."""
    if "BitsStored" not in dataset:
        raise UnreadableImageError(
            "is a DICOM file without an image of integers", remedy="remove it"
        )
    photometric = str(dataset.PhotometricInterpretation)
    height, width = int(dataset.Rows), int(dataset.Columns)
    bits, frames = int(dataset.BitsStored), int(dataset.get("NumberOfFrames") or 1)
    samples = int(dataset.SamplesPerPixel)
    if photometric not in (*GREY, *COLOURS):
        raise UnreadableImageError(
            "has an unknown photometric interpretation", remedy="save it as RGB"
        )
    if frames != 1:
        raise UnreadableImageError(
            f"has {frames} frames",
            remedy="save those that show the class as separate files: dcm2img --all-frames, or "
            "emf2sf of dcm4che",
        )
    is_grey = photometric in GREY
    if samples != (1 if is_grey or photometric == "PALETTE COLOR" else 3) or not 1 <= bits <= 16:
        raise UnreadableImageError(
            f"has {samples} samples of {bits} bits a pixel",
            remedy="save it with up to 16 bits a sample",
        )
    check_size(height, width)
    treatments: list[Treatment] = []
    if is_grey:
        _check_values(dataset)
        treatments.append("scaled")
        if _windows(dataset):
            treatments.append("windowed")
        if photometric == "MONOCHROME1":
            treatments.append("inverted")
    elif bits > 8:
        treatments.append("scaled")
    return Stored((height, width), f"DICOM {photometric}", tuple(treatments), is_grey)


def _parts(dataset: Any) -> Iterator[Any]:
    """The data set, and the parts of enhanced images with rescaling and window of their frame."""
    yield dataset
    for groups in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        for group in list(dataset.get(groups) or ())[:1]:
            for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
                yield from list(group.get(name) or ())[:1]


def _part_with(dataset: Any, *names: str) -> Any:
    """The part that has one of these elements, or None."""
    return next((p for p in _parts(dataset) if any(p.get(n) is not None for n in names)), None)


def _rescaling(dataset: Any) -> tuple[float, float]:
    """Slope and intercept."""
    part = _part_with(dataset, "RescaleSlope", "RescaleIntercept")
    if part is None:
        return 1.0, 0.0
    slope, intercept = part.get("RescaleSlope"), part.get("RescaleIntercept")
    return _number(1 if slope is None else slope), _number(0 if intercept is None else intercept)


def _windows(dataset: Any) -> Any:
    """The part with a window or a table of values of interest; None if there is none."""
    return _part_with(dataset, "WindowCenter", "VOILUTSequence")


def _check_values(dataset: Any) -> None:
    """Raise UnreadableImageError if nothing says which grey values are black and white."""
    part = _windows(dataset)
    if part is not None and part.get("WindowCenter") is not None:
        _window(part)
    if part is not None or dataset.get("ModalityLUTSequence"):
        return
    if _rescaling(dataset) != (1, 0) or dataset.get("PixelRepresentation", 0):
        raise UnreadableImageError(
            "has values of its own scale, and no window that says what is black and white",
            remedy="write WindowCenter and WindowWidth into it, the same in all files and on all "
            "nodes",
        )


def _window(part: Any) -> tuple[float, float, str]:
    """Centre, width and function of the first window."""
    centre, width = (_number(part.get(name)) for name in ("WindowCenter", "WindowWidth"))
    function = str(part.get("VOILUTFunction") or "LINEAR")
    if function not in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        raise UnreadableImageError(
            "has a window of an unknown function", remedy="save it with a linear one"
        )
    if width < 1 and (function == "LINEAR" or width <= 0):
        raise UnreadableImageError(f"has a window of width {width:g}, need at least 1")
    return centre, width, function


def _number(value: Any) -> float:
    """The value of an element, or its first one."""
    try:
        number = float(value[0] if hasattr(value, "__len__") and len(value) else value)
    except (TypeError, ValueError):
        number = float("nan")
    if not isfinite(number):
        raise UnreadableImageError(
            "has a window or rescaling that is no number", remedy="export it again"
        )
    return number


def _stored_values(dataset: Any) -> "NDArray[Any]":
    from pydicom.pixels.utils import pixel_array

    try:
        values: NDArray[Any] = pixel_array(dataset)
    except Exception:
        remedy = "export it again"
        if dataset.file_meta.TransferSyntaxUID.is_compressed:
            remedy = "decompress it (gdcmconv --raw, dcmdjpeg), or export it again"
        raise UnreadableImageError("has pixels that cannot be decoded", remedy=remedy) from None
    if values.shape[:2] != (dataset.Rows, dataset.Columns):
        raise UnreadableImageError(
            "has other pixels than its header says", remedy="export it again"
        )
    return values


def _grey(dataset: Any) -> "NDArray[np.float32]":
    """Values from 0 to 1, (1, H, W): modality table or rescaling, window, MONOCHROME1 inverted."""
    import numpy as np
    from pydicom.pixels.processing import apply_modality_lut, apply_voi

    values, bits = _stored_values(dataset), int(dataset.BitsStored)
    if dataset.get("ModalityLUTSequence"):
        bits = int(dataset.ModalityLUTSequence[0].LUTDescriptor[2])
        values = apply_modality_lut(values, dataset)
    else:
        slope, intercept = _rescaling(dataset)
        if (slope, intercept) != (1, 0):
            values = values * slope + intercept
    part = _windows(dataset)
    if part is not None and part.get("WindowCenter") is not None:
        shown = windowed(values, *_window(part))
    elif part is not None:
        table = int(part.VOILUTSequence[0].LUTDescriptor[2])
        shown = apply_voi(np.rint(values).astype(np.int64), part) / (2**table - 1)
    else:
        shown = values / (2**bits - 1)
    if dataset.PhotometricInterpretation == "MONOCHROME1":
        shown = 1 - shown
    return np.asarray(np.clip(shown, 0, 1), np.float32)[None]


def windowed(
    values: "NDArray[Any]", centre: float, width: float, function: str = "LINEAR"
) -> "NDArray[np.float64]":
    """Map values to 0 to 1 by a window, as DICOM PS3.3 C.11.2.1.2 and C.11.2.1.3 say."""
    import numpy as np

    values = np.asarray(values, dtype=np.float64)
    if function == "SIGMOID":
        with np.errstate(over="ignore"):  # of exp, whose result is then 0
            return 1 / (1 + np.exp(-4 * (values - centre) / width))
    if function == "LINEAR":
        centre, width = centre - 0.5, width - 1
    if width == 0:  # a threshold
        return (values > centre).astype(np.float64)
    return np.clip((values - centre) / width + 0.5, 0, 1)


def _colours(dataset: Any) -> "NDArray[np.uint8 | np.float32]":
    """Red, green and blue, (3, H, W)."""
    import numpy as np
    from pydicom.pixels.processing import apply_color_lut

    values, bits = _stored_values(dataset), int(dataset.BitsStored)
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        bits = int(dataset.RedPaletteColorLookupTableDescriptor[2])
        values = apply_color_lut(values, dataset)
    pixels = np.ascontiguousarray(values.transpose(2, 0, 1))
    if bits == 8 and pixels.dtype == np.uint8:
        return pixels
    return np.asarray(np.clip(pixels / (2**bits - 1), 0, 1), np.float32)


READERS = (Dicom(),)
