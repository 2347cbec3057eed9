"""Every command reads an image as a viewer shows it, by one reader."""

import ast
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, TiffImagePlugin
from typer.testing import CliRunner

from flwr_distill import ROOMS
from flwr_distill.cli.main import app
from flwr_distill.cli.source import load_source
from flwr_distill.server.export.description import Description
from flwr_distill.server.export.prediction import ExportedModel
from flwr_distill.task.datasets import DatasetError, DataSpec, auxiliary_images, load_private_data
from flwr_distill.task.image_files import UnusableFileError, inspect_image, open_image
from flwr_distill.task.survey import survey
from tests.errors import at

ROOT = Path(__file__).resolve().parents[2]
ORIENTATION = 0x0112
UNTURNED = {  # how a camera stores what an orientation brings upright
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
UPRIGHT = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
SPEC = DataSpec("colour", (3, 6, 8), 2, (0.0,) * 3, (1.0,) * 3)
GREY = DataSpec("grey", (1, 6, 8), 2, (0.0,), (1.0,))


def turned(folder, orientation, suffix="png", **options):
    """Save `UPRIGHT` with an EXIF orientation, in two classes."""
    image = Image.fromarray(UPRIGHT)
    exif = Image.Exif()
    if (method := UNTURNED[orientation]) is not None:
        image = image.transpose(method)
        exif[ORIENTATION] = orientation
    save(folder, image, suffix, exif=exif, **options)


def save(folder, image, suffix="png", **options):
    """Save an image as one of two classes, with a second one for those who hold one back."""
    for label in "01":
        (folder / label).mkdir(parents=True, exist_ok=True)
        for name in "ab":
            image.save(folder / label / f"{name}.{suffix}", **options)


def node(folder, spec):
    return load_private_data(folder, spec).to_samples(spec).inputs[0]


def predict(folder, spec):
    description = Description("none", spec)
    pixels = []
    model = ExportedModel(description, lambda inputs: pixels.append(inputs) or torch.zeros(1, 2))
    model.probabilities(next(folder.glob("0/*")))
    return pixels[0][0]


def distill_and_audit(folder, spec):
    shape = "x".join(map(str, spec.shape))
    source = load_source(str(folder), data_root=None, shape=shape, seed=0)
    return source.train.inputs[0] / 2 + 0.5


def distill_without_a_shape(folder, spec):
    source = load_source(str(folder), data_root=None, shape=None, seed=0)
    assert source.spec.shape == spec.shape
    return source.train.inputs[0] / 2 + 0.5


def auxiliary(folder, spec):
    return auxiliary_images(str(folder), spec, 1, 0)[0]


def data_check(folder, spec):
    seen = []
    survey(folder, lambda total, label, image: seen.append(image))
    pixels = np.atleast_3d(np.asarray(seen[0])).transpose(2, 0, 1)
    return torch.tensor(pixels / 255, dtype=torch.float32)


READERS = [node, predict, distill_and_audit, distill_without_a_shape, auxiliary, data_check]
every_reader = pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)


def as_inputs(pixels):
    return torch.tensor(np.atleast_3d(pixels).transpose(2, 0, 1) / 255, dtype=torch.float32)


@every_reader
@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", UNTURNED)
def test_a_photograph_is_read_upright_by_every_command(tmp_path, read, orientation, suffix):
    turned(tmp_path, orientation, suffix, **({"lossless": True} if suffix == "webp" else {}))
    torch.testing.assert_close(read(tmp_path, SPEC), as_inputs(UPRIGHT))


def icon(mode):
    """A shape in the alpha channel alone, black everywhere else."""
    alpha = Image.fromarray(np.where(UPRIGHT[..., 0] > 127, 255, 0).astype(np.uint8))
    if mode == "P":  # a palette with one transparent entry
        palette = Image.fromarray((np.asarray(alpha) > 0).astype(np.uint8)).convert("P")
        palette.putpalette([0, 0, 0] * 256)
        return palette, {"transparency": 0}
    if mode == "L":  # grey with one transparent value
        return Image.fromarray((np.asarray(alpha) == 0).astype(np.uint8) * 7), {"transparency": 7}
    bands = [Image.new("L", alpha.size, 0)] * (3 if mode == "RGBA" else 1)
    return Image.merge(mode, [*bands, alpha]), {}


@every_reader
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_a_shape_in_the_alpha_channel_is_seen_on_white_by_every_command(tmp_path, read, mode):
    image, options = icon(mode)
    save(tmp_path, image, **options)
    spec = SPEC if mode in ("RGBA", "P") else GREY
    shape = np.where(UPRIGHT[..., 0] > 127, 0, 255)
    expected = as_inputs(np.repeat(shape[..., None], spec.shape[0], axis=2))
    torch.testing.assert_close(read(tmp_path, spec), expected)


def test_half_transparent_colours_are_mixed_with_white(tmp_path):
    both = Image.new("RGBA", (2, 1), (255, 0, 100, 51))
    both.putpixel((1, 0), (255, 0, 100, 255))
    both.save(tmp_path / "c.png")
    pixels = open_image(tmp_path / "c.png").pixels
    assert pixels[:, 0].T.tolist() == [[255, 204, 224], [255, 0, 100]]


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_a_white_icon_that_would_vanish_is_an_error(tmp_path, mode):
    shape = icon(mode)[0].getchannel("A")
    white = Image.new(mode[:-1], shape.size, "white")
    white.putalpha(shape)
    white.save(tmp_path / "white.png")
    with pytest.raises(UnusableFileError, match="nothing", check=at(tmp_path / "white.png")):
        open_image(tmp_path / "white.png")


DEEP = np.random.default_rng(1).integers(0, 65536, (6, 8), dtype=np.uint16)
DEEP[0, :2] = 0, 65535


@every_reader
@pytest.mark.parametrize("suffix", ["png", "tif", "pgm", "floats"])
def test_deep_pixels_keep_all_bits_in_every_command(tmp_path, read, suffix):
    """Sixteen bits are divided by their largest value, and floats from 0 to 1 are kept."""
    if suffix == "floats":
        save(tmp_path, Image.fromarray((DEEP / 65535).astype(np.float32)), "tif")
    else:
        save(tmp_path, Image.fromarray(DEEP), suffix)
    tolerance = 1 / 255 if read is data_check else 1e-7  # which shows them in 8 bits
    expected = torch.tensor(DEEP[None] / 65535, dtype=torch.float32)
    torch.testing.assert_close(read(tmp_path, GREY), expected, atol=tolerance, rtol=0)


def test_resizing_floats_stays_within_0_and_1(tmp_path):
    rng = np.random.default_rng(5)
    save(tmp_path, Image.fromarray(rng.integers(65500, 65536, (37, 53)).astype(np.uint16)))
    for shape in ((1, 6, 8), (3, 61, 23)):
        spec = DataSpec("other", shape, 2, (0.5,) * shape[0], (0.5,) * shape[0])
        assert load_private_data(tmp_path, spec).images.max() <= 1


def test_deep_images_are_resized_and_coloured_like_others_also_mixed(tmp_path):
    pixels = np.random.default_rng(2).integers(0, 256, (12, 16), dtype=np.uint8)
    save(tmp_path, Image.fromarray(pixels))
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "0" / "deep.png")
    first, *others = load_private_data(tmp_path, SPEC).to_samples(SPEC).inputs
    assert len(others) == 4
    for other in others:
        torch.testing.assert_close(other, first, atol=1 / 255, rtol=0)


def twelve_bits(file):
    """A TIFF of two pixels, 0 and 4095, in 12 bits each."""
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    values = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 0, 277: 1, 278: 1, 279: 3}
    for tag, value in values.items():
        tags[tag] = value
    file.write_bytes(b"II*\x00\x08\x00\x00\x00" + tags.tobytes(8) + b"\x00\x0f\xff")


def test_twelve_bits_are_divided_by_4095(tmp_path):
    twelve_bits(tmp_path / "a.tif")
    assert open_image(tmp_path / "a.tif").pixels.tolist() == [[[0, 1]]]


def floats(highest):
    return Image.fromarray(np.linspace(0, highest, 48, dtype=np.float32).reshape(6, 8))


@pytest.mark.parametrize(
    ("image", "options", "said"),
    [
        (floats(255), {}, "float pixels from 0 to 255.*divide by 255"),
        (floats(np.nan), {}, "float pixels from nan to nan"),
        (Image.new("I", (8, 6), 70000), {}, "32-bit integers.*16 bits"),
        (Image.new("LAB", (8, 6)), {}, "LAB.*RGB"),
        (Image.new("I;16", (8, 6)), {"tiffinfo": {262: 0}}, "white as 0.*plain grey"),
    ],
)
def test_pixels_of_an_unknown_range_are_an_error_with_the_remedy(tmp_path, image, options, said):
    image.save(tmp_path / "odd.tif", **options)
    with pytest.raises(UnusableFileError, match=said, check=at(tmp_path / "odd.tif")):
        open_image(tmp_path / "odd.tif")


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_other_modes_are_read_as_their_colours(tmp_path, mode):
    image = Image.new("RGB", (8, 6), "black")
    image.paste("white", (0, 0, 4, 6))
    suffix = "png" if mode in ("1", "L", "P", "RGB") else "tif"
    image.convert(mode).save(tmp_path / f"a.{suffix}")
    read = open_image(tmp_path / f"a.{suffix}").pixels
    assert (read == np.asarray(image).transpose(2, 0, 1)).all()


def test_a_header_says_what_the_reader_will_do(tmp_path):
    turned(tmp_path / "turned", 6, "jpg")
    assert inspect_image(tmp_path / "turned/0/a.jpg").size == (6, 8)
    assert inspect_image(tmp_path / "turned/0/a.jpg").treatments == ("turned",)
    save(tmp_path / "icon", icon("LA")[0])
    assert inspect_image(tmp_path / "icon/0/a.png").treatments == ("on background",)
    save(tmp_path / "deep", Image.fromarray(DEEP))
    stored = inspect_image(tmp_path / "deep/0/a.png")
    assert (stored.mode, stored.treatments, stored.is_grey) == ("I;16", ("scaled",), True)


def test_colours_of_sixteen_bits_that_no_reader_keeps_are_read_with_eight_and_counted(tmp_path):
    deep = UPRIGHT.astype(np.uint16) * 256 + 200
    (tmp_path / "a.ppm").write_bytes(b"P6 8 6 65535\n" + deep.astype(">u2").tobytes())
    ink = np.concatenate([65535 - deep, np.zeros_like(deep[..., :1])], axis=2)
    tifffile.imwrite(tmp_path / "a.tif", ink, photometric="separated")
    for name in ("a.ppm", "a.tif"):
        picture = open_image(tmp_path / name)
        np.testing.assert_allclose(picture.pixels, deep.transpose(2, 0, 1) / 257, atol=1)
        assert picture.pixels.dtype == np.uint8
        assert picture.stored.treatments == ("reduced",)


def test_an_orientation_behind_the_pixels_of_a_png_is_applied(tmp_path):
    turned(tmp_path, 6)
    file = tmp_path / "0" / "a.png"
    content = file.read_bytes()
    start = content.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(content[start : start + 4], "big")
    exif, rest = content[start:end], content[:start] + content[end:]
    file.write_bytes(rest[:-12] + exif + rest[-12:])  # before IEND
    assert (open_image(file).pixels == UPRIGHT.transpose(2, 0, 1)).all()


def npz(folder, images):
    folder.mkdir(exist_ok=True)
    np.savez(folder / "own.npz", images=images, labels=np.arange(len(images)) % 2)
    return folder / "own.npz"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        *(("uint8", 255), ("uint16", 65535), (">u2", 65535)),
        *(("float16", 1), ("float32", 1), (float, 1), (bool, 1)),
    ],
)
def test_arrays_are_scaled_by_their_type(tmp_path, dtype, largest, channels):
    values = np.random.default_rng(3).random((4, 6, 8, channels))
    stored = (values.round() if dtype is bool else values * largest).astype(dtype)
    file = npz(tmp_path, stored)
    expected = torch.tensor((stored.astype(float) / largest).transpose(0, 3, 1, 2)).float()
    spec = SPEC if channels == 3 else GREY
    found = load_private_data(file, spec).to_samples(spec).inputs
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    found = auxiliary_images(str(file), spec, 4, 0).sort(dim=0).values
    torch.testing.assert_close(found, expected.sort(dim=0).values, atol=1e-6, rtol=0)
    source = load_source(str(file), data_root=None, shape=None, seed=0)
    assert source.train.inputs.min() >= -1
    assert source.train.inputs.max() <= 1


def test_arrays_of_floats_are_brought_to_the_runs_size_and_channels(tmp_path):
    pixels = np.random.default_rng(4).integers(0, 256, (2, 12, 16, 3), dtype=np.uint8)
    for spec in (SPEC, GREY):
        eight, deep = (
            load_private_data(npz(tmp_path / name, images), spec).to_samples(spec).inputs
            for name, images in (("eight", pixels), ("deep", pixels / 255))
        )
        torch.testing.assert_close(deep, eight, atol=1.5 / 255, rtol=0)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (np.linspace(0, 255, 96), "from 0 to 255.*divide by 255"),
        (np.linspace(-1, 1, 96), "from -1 to 1"),
        (np.full(96, np.nan), "from nan to nan"),
        (np.arange(96), r"int64.*0 is black and 255 white.*numpy\.uint8"),
        (np.arange(96) * 100, r"int64.*0 is black and 65535 white.*numpy\.uint16"),
        (np.arange(96, dtype=np.uint16), r"uint16.*0 is black and 255 white.*numpy\.uint8"),
        (np.arange(96) * 20 - 1000, "from -1000 to 900: scale them to floats from 0 to 1"),
        (np.full(96, "x"), "need uint8, uint16, or floats"),
    ],
)
def test_arrays_of_an_unknown_range_are_an_error_whose_remedy_loses_nothing(tmp_path, images, said):
    file = npz(tmp_path, images.reshape(2, 6, 8))
    with pytest.raises(DatasetError, match=said, check=at(file)):
        load_private_data(file, GREY)


def test_data_check_reports_what_the_network_sees(tmp_path):
    turned(tmp_path / "own", 6, "jpg")
    icon("RGBA")[0].save(tmp_path / "own" / "0" / "icon.png")
    Image.fromarray(DEEP // 2).save(tmp_path / "own" / "1" / "deep.png")
    output = tmp_path / "results"
    command = ["data", "check", str(tmp_path / "own"), "--output", str(output)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith("As read: "))
    for text in ("pixels from 0 to 1 of 1", "4 turned", "1 with transparency", "1 of more than 8"):
        assert text in line


def test_data_check_draws_pixels_as_bright_as_the_network_sees_them(tmp_path):
    dark = np.linspace(0, 4095, 64, dtype=np.uint16).reshape(8, 8)
    save(tmp_path / "own", Image.fromarray(dark))
    output = tmp_path / "results"
    command = ["data", "check", str(tmp_path / "own"), "--output", str(output)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert "pixels from 0 to 0.0625 of 1; 4 of more than 8 bits" in result.output
    assert "brighten" in result.output
    tiles = np.asarray(Image.open(output / "classes.png").convert("L"))[:, 20:]  # beside the names
    assert set(np.unique(tiles)) <= {*range(17), 255}


READ_IMAGES = {
    *("open", "imread", "read_image", "decode_image", "imdecode", "read_file", "pil_loader")
}


IMAGE_LIBRARIES = {"Image", "io", "cv2", "imageio", "plt"}


def calls_that_read_images(tree):
    """Calls such as ``Image.open`` and ``torchvision.io.decode_image``, by line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in READ_IMAGES:
            owner = ast.unparse(node.value).split(".")[-1]
            if owner in IMAGE_LIBRARIES and (owner, node.attr) != ("io", "open"):
                yield node.lineno
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith(("PIL", "torchvision", "cv2", "imageio"))
            and READ_IMAGES & {alias.name for alias in node.names}
        ):
            yield node.lineno


def test_only_the_reader_opens_image_files():
    places = {
        str(file.relative_to(ROOT))
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        if list(calls_that_read_images(ast.parse(file.read_text())))
    }
    assert {place for place in places if not place.startswith("task/readers/")} == {
        "task/image_files.py"
    }


@pytest.mark.parametrize(
    "code",
    [
        "from PIL import Image\nImage.open(path)",
        "import PIL.Image\nPIL.Image.open(path)",
        "from PIL.Image import open",
        "torchvision.io.decode_image(data)",
        "from torchvision.io import read_image",
        "cv2.imread(path)",
    ],
)
def test_each_way_to_open_an_image_is_found(code):
    assert list(calls_that_read_images(ast.parse(code)))
