"""DICOM images are shown as the standard says, and nothing of a patient leaves the header."""

import logging
import math
import sys
import warnings

import numpy as np
import pytest
from PIL import Image
from pydicom import dcmread
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels.processing import apply_windowing
from pydicom.sequence import Sequence
from pydicom.uid import (
    CTImageStorage,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLosslessSV1,
    RLELossless,
)
from typer.testing import CliRunner

from flwr_distill.cli.main import app
from flwr_distill.task.datasets import DatasetError, DataSpec, load_private_data
from flwr_distill.task.image_files import UnusableFileError, inspect_image, open_image
from flwr_distill.task.survey import survey
from tests.errors import at

RNG = np.random.default_rng(0)
GREY = DataSpec("grey", (1, 6, 8), 2, (0.0,), (1.0,))
CT = RNG.integers(0, 4096, (6, 8), dtype=np.uint16)
SECRETS = ("Doe^Jane", "MRN-4711", "19600229", "St Elsewhere")


def dicom(file, pixels=CT, syntax=ExplicitVRLittleEndian, encoded=None, **elements):
    """Write a DICOM file of `pixels`, or of `encoded` ones; elements replace the usual ones."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    meta.TransferSyntaxUID = syntax
    dataset = FileDataset(str(file), {}, file_meta=meta, preamble=b"\0" * 128)
    name, number, birth, place = SECRETS
    is_colour = pixels.ndim == 3 and pixels.shape[-1] == 3
    usual = {
        "SOPClassUID": CTImageStorage,
        "SOPInstanceUID": "1.2.3",
        "PatientName": name,
        "PatientID": number,
        "PatientBirthDate": birth,
        "InstitutionName": place,
        "Rows": pixels.shape[0],
        "Columns": pixels.shape[1],
        "SamplesPerPixel": 3 if is_colour else 1,
        "PhotometricInterpretation": "RGB" if is_colour else "MONOCHROME2",
        "BitsAllocated": 8 * pixels.itemsize,
        "BitsStored": 8 if pixels.itemsize == 1 else 12,
        "HighBit": 7 if pixels.itemsize == 1 else 11,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
        **({"PlanarConfiguration": 0} if is_colour else {}),
        **elements,
    }
    for key, value in usual.items():
        setattr(dataset, key, value)
    dataset.PixelData = encoded or pixels.tobytes()
    dataset["PixelData"].VR = "OB" if pixels.itemsize == 1 or encoded else "OW"
    file.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(file, enforce_file_format=True)
    return file


def by_the_standard(value, centre, width, function="LINEAR"):
    """PS3.3 C.11.2.1.2.1, C.11.2.1.3.2 and C.11.2.1.3.1, with 0 and 1 as the output's range."""
    if function == "SIGMOID":
        return 1 / (1 + math.exp(min(-4 * (value - centre) / width, 700)))
    if function == "LINEAR_EXACT":
        if value <= centre - width / 2:
            return 0
        return 1 if value > centre + width / 2 else (value - centre) / width + 0.5
    if value <= centre - 0.5 - (width - 1) / 2:
        return 0
    if value > centre - 0.5 + (width - 1) / 2:
        return 1
    return (value - (centre - 0.5)) / (width - 1) + 0.5


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize(("centre", "width"), [(40, 400), (-600, 1500), (100, 1), (2000.5, 20.25)])
def test_windows_and_rescaling_are_those_of_the_standard(tmp_path, function, centre, width):
    rescaling = {"RescaleSlope": 2, "RescaleIntercept": -1024}
    window = {"WindowCenter": centre, "WindowWidth": width, "VOILUTFunction": function}
    file = dicom(tmp_path / "a.dcm", **rescaling, **window)
    values = (2.0 * CT - 1024).flatten().tolist()
    expected = [by_the_standard(value, centre, width, function) for value in values]
    picture = open_image(file)
    np.testing.assert_allclose(picture.pixels.flatten(), expected, atol=1e-6)
    assert picture.stored.treatments == ("scaled", "windowed")


def test_the_first_of_several_windows_is_applied_as_pydicom_does(tmp_path):
    one = dicom(tmp_path / "one.dcm", WindowCenter=2000, WindowWidth=1000)
    shown = apply_windowing(CT.astype(float), dcmread(one)) / 4095
    np.testing.assert_allclose(open_image(one).pixels[0], shown, atol=1e-6)
    two = dicom(tmp_path / "two.dcm", WindowCenter=[2000, 40], WindowWidth=[1000, 400])
    np.testing.assert_array_equal(open_image(one).pixels, open_image(two).pixels)


def test_monochrome1_is_inverted(tmp_path):
    window = {"WindowCenter": 2000, "WindowWidth": 3000}
    plain = dicom(tmp_path / "2.dcm", **window)
    film = dicom(tmp_path / "1.dcm", PhotometricInterpretation="MONOCHROME1", **window)
    np.testing.assert_allclose(open_image(film).pixels, 1 - open_image(plain).pixels, atol=1e-6)
    assert inspect_image(film).treatments == ("scaled", "windowed", "inverted")


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
def test_without_a_window_all_bits_that_are_stored_are_kept(tmp_path, syntax):
    every = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    read = open_image(dicom(tmp_path / "a.dcm", every, syntax)).pixels
    np.testing.assert_allclose(read[0], every / 4095, atol=1e-7)
    assert len(np.unique(read)) == 4096


def test_signed_values_keep_their_sign(tmp_path):
    values = np.array([[-1000, -500], [0, 500]], np.int16)
    window = {"WindowCenter": -250, "WindowWidth": 1600, "BitsStored": 16, "HighBit": 15}
    read = open_image(dicom(tmp_path / "a.dcm", values, **window)).pixels
    expected = [by_the_standard(value, -250, 1600) for value in values.flatten().tolist()]
    np.testing.assert_allclose(read.flatten(), expected, atol=1e-6)


def table(first, values, bits, vr="US"):
    item = Dataset()
    item.add_new("LUTDescriptor", "SS" if first < 0 else "US", [len(values), first, bits])
    item.add_new("LUTData", vr, values)
    return Sequence([item])


def test_a_table_of_values_of_interest_is_applied(tmp_path):
    values = np.array([[0, 1], [2, 3]], np.uint16)
    file = dicom(tmp_path / "a.dcm", values, VOILUTSequence=table(1, [10, 4095, 7], 12))
    np.testing.assert_allclose(open_image(file).pixels[0] * 4095, [[10, 10], [4095, 7]], atol=1e-3)


def test_an_enhanced_image_is_rescaled_and_windowed_by_its_functional_groups(tmp_path):
    transformation, window, group = Dataset(), Dataset(), Dataset()
    transformation.RescaleSlope, transformation.RescaleIntercept = 2, -1024
    window.WindowCenter, window.WindowWidth = 40, 400
    group.PixelValueTransformationSequence = Sequence([transformation])
    group.FrameVOILUTSequence = Sequence([window])
    groups = {"SharedFunctionalGroupsSequence": Sequence([group]), "NumberOfFrames": 1}
    enhanced = dicom(tmp_path / "a.dcm", **groups)
    rescaling = {"RescaleSlope": 2, "RescaleIntercept": -1024}
    plain = dicom(tmp_path / "b.dcm", **rescaling, WindowCenter=40, WindowWidth=400)
    np.testing.assert_array_equal(open_image(enhanced).pixels, open_image(plain).pixels)


def test_colours_are_kept(tmp_path):
    pixels = RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    read = open_image(dicom(tmp_path / "a.dcm", pixels)).pixels
    np.testing.assert_array_equal(read, pixels.transpose(2, 0, 1))
    planar = np.ascontiguousarray(pixels.transpose(2, 0, 1)).reshape(6, 8, 3)
    file = dicom(tmp_path / "b.dcm", planar, PlanarConfiguration=1)
    np.testing.assert_array_equal(open_image(file).pixels, pixels.transpose(2, 0, 1))


def test_a_palette_is_applied(tmp_path):
    numbers = np.array([[0, 1], [2, 1]], np.uint8)
    colours = np.array([[0, 65535, 256], [0, 0, 512], [65535, 0, 1024]], np.uint16)
    palette = {"PhotometricInterpretation": "PALETTE COLOR"}
    for name, values in zip(("Red", "Green", "Blue"), colours, strict=True):
        palette[f"{name}PaletteColorLookupTableDescriptor"] = [3, 0, 16]
        palette[f"{name}PaletteColorLookupTableData"] = values.tobytes()
    read = open_image(dicom(tmp_path / "a.dcm", numbers, **palette)).pixels
    np.testing.assert_allclose(read, colours[:, numbers] / 65535, atol=1e-6)


def jpeg2000(pixels):
    import imagecodecs

    return encapsulate([imagecodecs.jpeg2k_encode(pixels, level=0, codecformat="j2k")])


def test_compressed_pixels_are_those_that_were_compressed(tmp_path):
    plain = dcmread(dicom(tmp_path / "plain.dcm"))
    plain.compress(RLELossless)
    plain.save_as(tmp_path / "rle.dcm")
    expected = open_image(tmp_path / "plain.dcm").pixels
    np.testing.assert_array_equal(open_image(tmp_path / "rle.dcm").pixels, expected)
    file = dicom(tmp_path / "j2k.dcm", syntax=JPEG2000Lossless, encoded=jpeg2000(CT))
    np.testing.assert_allclose(open_image(file).pixels, expected, atol=1e-6)


LOSSLESS = encapsulate([b"\xff\xd8\xff\xc3" * 9])
REFUSED = {
    "frames": ({"NumberOfFrames": 30}, "30 frames"),
    "signed": ({"PixelRepresentation": 1}, "WindowCenter"),
    "rescaled": ({"RescaleSlope": 1, "RescaleIntercept": -1024}, "WindowCenter"),
    "no width": ({"WindowCenter": 40, "WindowWidth": 0}, "width 0"),
    "function": ({"WindowCenter": 4, "WindowWidth": 9, "VOILUTFunction": "Doe"}, "function"),
    "photometric": ({"PhotometricInterpretation": "Doe^Jane"}, "photometric"),
    "rows": ({"Rows": 60}, "decoded"),
    "huge": ({"Rows": 65535, "Columns": 65535}, "65535 x 65535"),
    "none": ({"Rows": 0}, None),
    "bits": ({"BitsAllocated": 32, "BitsStored": 32, "HighBit": 31}, "32 bits"),
    "samples": ({"SamplesPerPixel": 7}, "7 samples"),
    "lossless": ({"syntax": JPEGLosslessSV1, "encoded": LOSSLESS}, "dcmdjpeg"),
}


@pytest.mark.parametrize(("elements", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_shown_is_an_error_of_one_line(tmp_path, elements, said):
    file = dicom(tmp_path / "odd.dcm", **elements)
    with pytest.raises(UnusableFileError, match=said, check=at(file)) as caught:
        open_image(file)
    assert len(str(caught.value).splitlines()) == 1


def test_a_deflated_file_is_refused_before_it_is_inflated(tmp_path, monkeypatch):
    file = dicom(tmp_path / "bomb.dcm", CT, DeflatedExplicitVRLittleEndian)
    monkeypatch.setattr("zlib.decompress", lambda *args: pytest.fail("inflated"))
    with pytest.raises(UnusableFileError, match="deflated", check=at(file)):
        inspect_image(file)


def test_a_file_that_is_cut_off_is_an_error_wherever_it_ends(tmp_path):
    content = dicom(tmp_path / "whole.dcm", WindowCenter=40, WindowWidth=400).read_bytes()
    for end in range(132, len(content), 7):
        (tmp_path / "cut.dcm").write_bytes(content[:end])
        with pytest.raises(UnusableFileError, check=at(tmp_path / "cut.dcm")):
            open_image(tmp_path / "cut.dcm")


def test_a_few_odd_bytes_anywhere_end_in_an_image_or_one_line(tmp_path):
    content = dicom(tmp_path / "whole.dcm", WindowCenter=40, WindowWidth=400).read_bytes()
    file = tmp_path / "odd.dcm"
    errors = []
    for _ in range(300):
        odd = bytearray(content)
        for place in RNG.integers(132, len(content), 3):
            odd[place] = RNG.integers(256)
        file.write_bytes(odd)
        try:
            pixels = open_image(file).pixels
        except UnusableFileError as error:
            errors.append(str(error))
        else:
            assert np.isfinite(pixels).all()
            assert 0 <= pixels.min() <= pixels.max() <= 1
    assert errors
    assert all(len(error.splitlines()) == 1 for error in errors)
    assert not [secret for secret in SECRETS if secret in "".join(errors)]


def test_nothing_of_a_patient_is_in_logs_errors_or_results(tmp_path, caplog, capfd):
    own = tmp_path / "own"
    window = {"WindowCenter": 2000, "WindowWidth": 4000}
    for label in "01":
        dicom(own / label / "good.dcm", **window)
    for name, (elements, _) in REFUSED.items():
        dicom(own / "1" / f"{name.replace(' ', '-')}.dcm", **elements)
    dicom(own / "0" / "odd-window.dcm", WindowCenter=40, WindowWidth=400)
    odd = (own / "0" / "odd-window.dcm").read_bytes()
    (own / "0" / "odd-window.dcm").write_bytes(odd.replace(b"400 ", b"Doe "))
    (own / "0" / "odd-date.dcm").write_bytes(odd.replace(b"19600229", b"Doe^Jane"))
    (own / "0" / "odd-syntax.dcm").write_bytes(odd.replace(b".10008.1.2.1\0", b".Doe^Jane^^.\0"))
    dicom(own / "0" / "odd-text.dcm", SpecificCharacterSet="ISO_IR 192")
    odd = (own / "0" / "odd-text.dcm").read_bytes()
    (own / "0" / "odd-text.dcm").write_bytes(odd.replace(b"ISO_IR 192", b"Doe^Jane^^"))
    dicom(own / "0" / "odd-frames.dcm", NumberOfFrames=1234)
    odd = (own / "0" / "odd-frames.dcm").read_bytes()
    (own / "0" / "odd-frames.dcm").write_bytes(odd.replace(b"1234", b"Doe "))
    caplog.clear()
    capfd.readouterr()  # what writing these files says
    output = tmp_path / "results"
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        load_private_data(own, GREY)
        said = [survey(own, decode=decode).in_a_line() for decode in (True, False)]
        command = ["data", "check", str(own), "--output", str(output)]
        said.append(CliRunner().invoke(app, command, env={"COLUMNS": "200"}).output)
    said += [str(warning.message) for warning in warned]
    said += [(output / "findings.csv").read_text(), caplog.text, *capfd.readouterr()]
    text = "\n".join(said)
    assert "odd-window" in text
    assert not [secret for secret in (*SECRETS, "Doe") if secret in text]


def test_a_folder_of_dicom_files_is_read_like_one_of_png(tmp_path):
    spec = DataSpec("grey", (1, 3, 4), 2, (0.0,), (1.0,))
    for label in "01":
        dicom(tmp_path / "dicom" / label / "a.dcm", CT * (1 + int(label)) // 2)
        (tmp_path / "png" / label).mkdir(parents=True)
        deep = np.rint(CT * (1 + int(label)) // 2 * (65535 / 4095)).astype(np.uint16)
        Image.fromarray(deep).save(tmp_path / "png" / label / "a.png")
    one, other = (load_private_data(tmp_path / kind, spec) for kind in ("dicom", "png"))
    np.testing.assert_allclose(one.images, other.images, atol=1e-4)


def test_without_pydicom_the_data_are_refused_with_the_extra(tmp_path, monkeypatch):
    for label in "01":
        dicom(tmp_path / label / "a.dcm")
        Image.new("L", (8, 6)).save(tmp_path / label / "a.png")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    monkeypatch.setitem(sys.modules, "pydicom.config", None)
    with pytest.raises(DatasetError, match=r"flwr-distill\[dicom\]"):
        load_private_data(tmp_path, GREY)
