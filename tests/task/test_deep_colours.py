"""TIFF and PNG with 16 bits a colour are read without loss, and pages are never chosen silently."""

import struct
import sys
import zlib
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from flwr_distill.task.datasets import DatasetError, DataSpec, load_private_data
from flwr_distill.task.image_files import UnusableFileError, inspect_image, open_image
from tests.errors import at

RNG = np.random.default_rng(0)
DEEP = RNG.integers(0, 65536, (6, 8, 3), dtype=np.uint16)
ALPHA = RNG.integers(0, 65536, (6, 8, 1), dtype=np.uint16)
RGBA = np.concatenate([DEEP, ALPHA], axis=2)
ORIENTATION = 274


def chunk(kind, content):
    """One chunk of a PNG file."""
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check


def png(file, pixels):
    """Write a PNG by hand."""
    height, width, channels = pixels.shape
    colour = {2: 4, 3: 2, 4: 6}[channels]
    head = struct.pack(">IIBBBBB", width, height, 8 * pixels.itemsize, colour, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(pixels.dtype.newbyteorder(">")).tobytes() for row in pixels)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def exif(file, orientation):
    """Put an orientation into a PNG, before its pixels."""
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    added = chunk(b"eXIf", tags.tobytes().removeprefix(b"Exif\0\0"))
    content = file.read_bytes()
    start = content.index(b"IDAT") - 4
    file.write_bytes(content[:start] + added + content[start:])


def tiff(file, pixels, **options):
    options = {"photometric": "rgb", **options}
    if options.get("planarconfig") == "separate":
        pixels = pixels.transpose(2, 0, 1)
    tifffile.imwrite(file, pixels, **options)


TIFFS = {
    "plain": {},
    "big-endian": {"byteorder": ">"},
    "big": {"bigtiff": True},
    "planar": {"planarconfig": "separate"},
    "tiled": {"tile": (16, 16)},
    "lzw": {"compression": "lzw", "predictor": True},
    "deflate": {"compression": "zlib", "predictor": True},
    "packbits": {"compression": "packbits"},
}


@pytest.mark.parametrize("options", [*TIFFS.values(), None, -1], ids=[*TIFFS, "png", "filtered"])
def test_no_bit_of_the_colours_is_lost(tmp_path, options):
    file = tmp_path / "a.tif"
    if isinstance(options, dict):
        tiff(file, DEEP, **options)
    elif options is None:
        png(file := tmp_path / "a.png", DEEP)
    else:
        file = tmp_path / "a.png"
        file.write_bytes(imagecodecs.png_encode(DEEP, filter=options))
    picture = open_image(file)
    np.testing.assert_allclose(picture.pixels, (DEEP / 65535).transpose(2, 0, 1), atol=1e-7)
    assert picture.stored == inspect_image(file)
    assert picture.stored.treatments == ("scaled",)
    assert not picture.stored.is_grey


@pytest.mark.parametrize("kind", ["png", "tif", "grey"])
def test_transparency_of_sixteen_bits_is_put_on_white(tmp_path, kind):
    pixels = RGBA if kind != "grey" else RGBA[..., 2:]
    file = tmp_path / ("a.tif" if kind == "tif" else "a.png")
    tiff(file, pixels, extrasamples=["unassalpha"]) if kind == "tif" else png(file, pixels)
    colours, alpha = pixels[..., :-1] / 65535, pixels[..., -1:] / 65535
    shown = (colours * alpha + 1 - alpha).transpose(2, 0, 1)
    picture = open_image(file)
    np.testing.assert_allclose(picture.pixels, shown, atol=1e-6)
    assert set(picture.stored.treatments) == {"on background", "scaled"}
    assert picture.stored.is_grey == (kind == "grey")


def test_a_white_icon_of_sixteen_bits_that_would_vanish_is_an_error(tmp_path):
    file = tmp_path / "white.png"
    png(file, np.where([1, 1, 1, 0], 65535, RGBA).astype(np.uint16))
    with pytest.raises(UnusableFileError, match="nothing", check=at(file)):
        open_image(file)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_deep_colours_are_turned_like_others(tmp_path, orientation):
    png(tmp_path / "deep.png", DEEP)
    png(tmp_path / "plain.png", (DEEP // 257).astype(np.uint8))
    for name in ("deep", "plain"):
        exif(tmp_path / f"{name}.png", orientation)
    tiff(tmp_path / "deep.tif", DEEP, extratags=[(ORIENTATION, "H", 1, orientation, True)])
    plain = open_image(tmp_path / "plain.png").pixels / 255
    for name in ("deep.png", "deep.tif"):
        picture = open_image(tmp_path / name)
        np.testing.assert_allclose(picture.pixels, plain, atol=1.1 / 255)
        assert picture.stored.size == picture.pixels.shape[1:]


def test_deep_colours_are_fitted_to_the_runs_size_and_channels(tmp_path):
    for label in "01":
        (tmp_path / label).mkdir()
        png(tmp_path / label / "a.png", DEEP)
    raw = load_private_data(tmp_path, DataSpec("grey", (1, 6, 8), 2, (0.0,), (1.0,)))
    grey = DEEP @ [0.299, 0.587, 0.114] / 65535
    np.testing.assert_allclose(raw.images[0, 0], grey, atol=1e-6)


def pages(file, *sizes, reduced):
    with tifffile.TiffWriter(file) as writer:
        for number, size in enumerate(sizes):
            kind = {"subfiletype": 1} if number and reduced else {}
            writer.write(RNG.integers(0, 256, size, dtype=np.uint8), metadata=None, **kind)


@pytest.mark.parametrize("read", [open_image, inspect_image])
def test_a_tiff_of_several_pages_is_an_error_and_smaller_copies_are_no_pages(tmp_path, read):
    pages(tmp_path / "stack.tif", (6, 8), (6, 8), reduced=False)
    with pytest.raises(UnusableFileError, match="pages", check=at(tmp_path / "stack.tif")):
        read(tmp_path / "stack.tif")
    pages(tmp_path / "pyramid.tif", (12, 16), (6, 8), (3, 4), reduced=True)
    assert getattr(read(tmp_path / "pyramid.tif"), "size", (12, 16)) == (12, 16)


def test_files_with_other_samples_or_too_many_bytes_are_errors(tmp_path, monkeypatch):
    file = tmp_path / "a.tif"
    tiff(file, RGBA, extrasamples=["assocalpha"])
    with pytest.raises(UnusableFileError, match="samples", check=at(file)):
        open_image(file)
    monkeypatch.setattr("flwr_distill.task.image_files.MAX_BYTES", 100)
    with pytest.raises(UnusableFileError, match="100 bytes", check=at(file)):
        open_image(file)


def bomb(file):
    """A PNG header that declares more pixels than are allowed."""
    png(file, DEEP)
    content = bytearray(file.read_bytes())
    content[16:24] = struct.pack(">II", 60000, 60000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    file.write_bytes(content)


def huge_tiff(file):
    tiff(file, DEEP)
    content = file.read_bytes()
    for tag, value in ((256, 8), (257, 6)):
        before = struct.pack("<HHI", tag, 3, 1) + struct.pack("<H", value)
        if before not in content:
            before = struct.pack("<HHII", tag, 4, 1, value)
        assert before in content
        content = content.replace(before, before[:8] + struct.pack("<H", 60000))
    file.write_bytes(content)


@pytest.mark.parametrize("write", [bomb, huge_tiff], ids=["png", "tif"])
def test_a_wrong_declared_size_is_refused_before_pixels_are_allocated(tmp_path, write):
    file = tmp_path / ("huge.png" if write is bomb else "huge.tif")
    write(file)
    with pytest.raises(UnusableFileError, check=at(file)):
        open_image(file)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_a_damaged_file_is_an_error_of_one_line(tmp_path, suffix):
    file = tmp_path / f"a.{suffix}"
    png(file, DEEP) if suffix == "png" else tiff(file, DEEP, compression="zlib")
    content = file.read_bytes()
    file.write_bytes(content[:60] + bytes(40) + content[100:])
    with pytest.raises(UnusableFileError, check=at(file)) as caught:
        open_image(file)
    assert len(str(caught.value).splitlines()) == 1


def test_without_tifffile_the_data_are_refused_with_the_extra(tmp_path, monkeypatch):
    for label in "01":
        (tmp_path / label).mkdir()
        tiff(tmp_path / label / "a.tif", DEEP)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(DatasetError, match=r"flwr-distill\[tiff\]"):
        load_private_data(Path(tmp_path), DataSpec("colour", (3, 6, 8), 2, (0.0,) * 3, (1.0,) * 3))
