import hashlib
import io
import os
import tarfile
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from labkit.models import build, cifar, data, loss
from labkit.models.cifar import CorruptArchive, cifar10
from labkit.models.images import Images
from labkit.models.text import Text, source_files

# Digits


def test_digits_are_scikit_learn_s():
    from sklearn.datasets import load_digits  # here: the ranks of other tests import this file, too

    images, labels = load_digits(return_X_y=True)
    expected = torch.from_numpy(images) / 8 - 1  # 0 to 16 -> -1 to 1
    ours = [data.digits(split=split) for split in ("train", "test")]
    assert [len(part) for part in ours] == [1500, 297]
    found = torch.stack([pixels for part in ours for pixels, _ in part])
    assert found.shape == (1797, 64) and found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1 / 127.5  # one step of a byte
    assert [int(label) for part in ours for _, label in part] == labels.tolist()
    assert ours[0][0][1].dtype == torch.int64


def test_digits_as_images():
    flat, image, rgb = (data.digits(form)[3][0] for form in ("flat", "image", "rgb"))
    assert torch.equal(image, flat.view(1, 8, 8))
    assert rgb.shape == (3, 32, 32) and torch.equal(rgb[0], rgb[2])
    assert rgb.min() >= -1 and rgb.max() <= 1
    # Bilinear resizing by four: the mean over each 4x4 tile is close to the pixel it came from.
    tiles = rgb[:1].reshape(8, 4, 8, 4).mean(dim=(1, 3))
    assert (tiles - image[0]).abs().mean() < 0.2
    assert str(data.digits("rgb", "test")) == "297 handwritten digits of scikit-learn (test), 3x32x32"


def test_rgb_digits_hold_one_channel():
    assert data.digits("rgb").pixels.untyped_storage().nbytes() == 1797 * 32 * 32


# Text


def test_text_is_the_source_of_this_python():
    text = data.stdlib_text(max_bytes=200_000)
    window, target = text[0]
    assert window.dtype == torch.int64 and window.shape == (64,)
    start = bytes(window.tolist())
    assert os.__file__.endswith("os.py") and start == open(os.path.dirname(os.__file__) + "/__future__.py", "rb").read(
        64
    )
    assert torch.equal(window[1:], target[:-1])
    assert "files, " in str(text) and "(train) in windows of 64" in str(text)


def test_text_windows_cover_every_byte_once():
    corpus = torch.arange(101, dtype=torch.uint8)
    text = Text(corpus, 10, "counting")
    assert len(text) == 10
    assert torch.equal(torch.cat([window for window, _ in text]), torch.arange(100))
    assert torch.equal(torch.cat([target for _, target in text]), torch.arange(1, 101))
    with pytest.raises(IndexError):
        text[10]
    with pytest.raises(ValueError, match="10 bytes of text must be more than one window of 10"):
        Text(corpus[:10], 10, "")


def test_text_is_bounded_deterministic_and_split():
    parts = [data.stdlib_text(32, split, max_bytes=100_000) for split in ("train", "test")]
    sizes = [len(part.corpus) for part in parts]
    assert 50_000 < sum(sizes) <= 100_000
    assert abs(sizes[0] / sum(sizes) - 0.9) < 0.001
    again = data.stdlib_text(32, "train", max_bytes=100_000)
    assert torch.equal(again.corpus, parts[0].corpus) and str(again) == str(parts[0])


def test_text_leaves_out_packages_tests_and_builds(tmp_path):
    kept = ["a.py", "b/__init__.py", "b.py", "b/c.py"]
    left_out = [
        "site-packages/x.py",
        "test/x.py",
        "b/tests/x.py",
        "b/__pycache__/x.py",
        "config-3.11/x.py",
        "_sysconfigdata_linux.py",
        "b/notes.txt",
    ]
    for name in kept + left_out:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass\n")
    found = [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)]
    assert found == sorted(kept)


def test_a_python_without_source(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"no Python source .* in {tmp_path}"):
        data.stdlib_text()


# By name


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt"])
def test_auto_fits_the_model(name):
    for split in ("train", "test"):
        inputs, targets = next(iter(DataLoader(data.load("auto", name, split), batch_size=4)))
        assert loss(name)(build(name)(inputs), targets).isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("auto", "bert"), "unknown model 'bert': choose from 'mlp', 'resnet', 'gpt'"),
        (("imagenet", "mlp"), "unknown data 'imagenet': choose from 'digits', 'stdlib_text', 'cifar10'"),
        (("digits", "gpt"), "unknown data for the model 'gpt': 'digits': choose from 'stdlib_text'"),
        (("auto", "mlp", "validation"), "unknown split 'validation': choose from 'train', 'test'"),
        (("auto", "gpt", "validation"), "unknown split 'validation'"),
        (("cifar10", "resnet", "validation"), "unknown split 'validation'"),
    ],
)
def test_unknown_names(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.load(*arguments)
    with pytest.raises(ValueError, match="unknown image 'square': choose from 'flat', 'image', 'rgb'"):
        data.digits("square")


def test_options_reach_the_dataset():
    assert data.load("stdlib_text", "gpt", context=16, max_bytes=50_000)[0][0].shape == (16,)


def test_slow_waits_before_every_item(monkeypatch):
    waits = []
    monkeypatch.setattr("labkit.models.data.time.sleep", waits.append)
    slow = data.Slow([10, 20, 30], ms=5)
    assert [slow[index] for index in range(len(slow))] == [10, 20, 30]
    assert waits == [0.005] * 3


def test_a_loader_s_batch_is_its_items():
    dataset = data.digits("rgb")
    pixels, labels = next(iter(DataLoader(dataset, batch_sampler=[[5, 3, 700]])))
    for row, index in enumerate((5, 3, 700)):
        assert torch.equal(pixels[row], dataset[index][0]) and labels[row] == dataset[index][1]


def test_images_and_labels_must_match():
    with pytest.raises(ValueError, match="3 images but 2 labels"):
        Images(torch.zeros(3, 4, dtype=torch.uint8), torch.zeros(2), "")


# CIFAR-10, in archives of three images per file


def records(number):
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(10, (3, 1), generator=generator)
    return torch.cat([labels, torch.randint(256, (3, 3072), generator=generator)], 1).to(torch.uint8)


def write_archive(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A small archive in the official format in tmp_path/source, that counts as the published one."""
    names = [*cifar.MEMBERS["train"], *cifar.MEMBERS["test"]]
    path = tmp_path / "source" / "cifar-10-binary.tar.gz"
    path.parent.mkdir()
    write_archive(path, {name: bytes(records(i).flatten().tolist()) for i, name in enumerate(names)})
    publish(monkeypatch, path)
    return path


def publish(monkeypatch, path):
    monkeypatch.setattr(cifar, "MD5", hashlib.md5(path.read_bytes()).hexdigest())
    monkeypatch.setattr(cifar, "ARCHIVE_BYTES", path.stat().st_size)
    monkeypatch.setattr(cifar, "RECORDS", 3)
    monkeypatch.setattr(cifar, "URL", path.as_uri())


def left_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock") if folder.exists() else []


def test_cifar10_is_parsed(tiny):
    train, test = (cifar10(tiny.parent, split=split) for split in ("train", "test"))
    assert (len(train), len(test)) == (15, 3)
    for dataset, numbers in ((train, range(5)), (test, [5])):
        expected = torch.cat([records(number) for number in numbers])
        for (pixels, label), record in zip(dataset, expected, strict=True):
            assert label == record[0] and label.dtype == torch.int64
            torch.testing.assert_close(pixels, record[1:].view(3, 32, 32) / 127.5 - 1)
    assert str(test) == "3 photographs of CIFAR-10 (test), 3x32x32"
    assert left_in(tiny.parent) == ["cifar-10-binary.tar.gz", "cifar-10-test.bin", "cifar-10-train.bin"]
    tiny.unlink()
    assert len(cifar10(tiny.parent)) == 15  # unpacked once, the archive is no longer needed


def test_cifar10_missing(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        cifar10(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere" / "cifar-10-binary.tar.gz") in str(error.value)
    assert "cifar10(download=True)" in str(error.value)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("damage", ["truncated", "one flipped bit", "empty", "an error page"])
def test_cifar10_corrupt(tiny, damage):
    content = bytearray(tiny.read_bytes())
    if damage == "one flipped bit":
        content[len(content) // 2] ^= 1
    content = {"truncated": content[:-1000], "empty": b"", "an error page": b"<html>404</html>"}.get(damage, content)
    tiny.write_bytes(content)
    for download in (False, True):
        with pytest.raises(CorruptArchive) as error:
            cifar10(tiny.parent, download)
        for part in (str(tiny), f"{len(content)} bytes", cifar.MD5, "Delete it", "download=True"):
            assert part in str(error.value)
        assert "\n" not in str(error.value)
    assert left_in(tiny.parent) == ["cifar-10-binary.tar.gz"]


def test_cifar10_download(tiny, tmp_path, monkeypatch):
    fetched = cifar10(tmp_path / "root", download=True)
    assert len(fetched) == 15
    monkeypatch.setattr(cifar.urllib.request, "urlopen", None)  # nothing is fetched a second time
    assert len(cifar10(tmp_path / "root", download=True, split="test")) == 3


class Broken(io.BytesIO):
    """A response that gives one chunk and then fails."""

    def __init__(self, failure):
        super().__init__(b"x" * 100)
        self.headers = {"Content-Length": "1000"}
        self.failure = failure

    def read(self, size):
        chunk = super().read(size)
        if not chunk and self.failure:
            raise self.failure
        return chunk


@pytest.mark.parametrize("failure", [None, ConnectionResetError("reset"), TimeoutError("timed out")])
def test_a_broken_download_falls_back_to_digits(monkeypatch, tmp_path, capsys, failure):
    monkeypatch.setattr(cifar.urllib.request, "urlopen", lambda url, timeout: Broken(failure))
    dataset = cifar10(tmp_path, download=True, split="test")
    assert dataset[0][0].shape == (3, 32, 32) and "digits" in str(dataset)
    reason = str(failure) if failure else "closed after 100 of 1000 bytes"
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and reason in told and told.endswith("using digits at 3x32x32 instead.\n")
    assert left_in(tmp_path) == []


def test_offline(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cifar, "URL", (tmp_path / "not there").as_uri())
    assert "digits" in str(cifar10(tmp_path / "root", download=True))
    assert capsys.readouterr().out.count("\n") == 1
    assert left_in(tmp_path / "root") == []


def test_an_interrupted_download_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(cifar.urllib.request, "urlopen", lambda url, timeout: Broken(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        cifar10(tmp_path, download=True)
    assert left_in(tmp_path) == []


def test_a_download_of_something_else_is_not_kept(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(cifar, "MD5", "0" * 32)
    with pytest.raises(CorruptArchive, match=r"the content of file:.* is damaged .* MD5 0{32}. It was not kept"):
        cifar10(tmp_path / "root", download=True)
    assert left_in(tmp_path / "root") == []


@pytest.mark.parametrize("fault", ["missing", "short", "link"])
def test_an_archive_of_another_layout(monkeypatch, tmp_path, fault):
    # The checksum forbids all of these; the unpacking must not rely on it.
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for number, name in enumerate(cifar.MEMBERS["train"]):
            info = tarfile.TarInfo(name)
            content = bytes(records(number).flatten().tolist())
            if number == 4 and fault == "missing":
                info.name = "../../etc/data_batch_5.bin"
            if number == 4 and fault == "short":
                content = content[:-1]
            if number == 4 and fault == "link":
                info.type, info.linkname = tarfile.SYMTYPE, cifar.MEMBERS["train"][0]
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if info.isreg() else None)
    publish(monkeypatch, path)
    with pytest.raises(CorruptArchive, match=r"data_batch_5\.bin"):
        cifar10(tmp_path)
    assert left_in(tmp_path) == ["cifar-10-binary.tar.gz"]


def test_unpacked_records_are_checked(tiny):
    cifar10(tiny.parent)
    unpacked = tiny.parent / "cifar-10-train.bin"
    content = unpacked.read_bytes()
    unpacked.write_bytes(content[:-1])
    with pytest.raises(CorruptArchive, match=r"cifar-10-train.bin has \d+ bytes, expected \d+. Delete it"):
        cifar10(tiny.parent)
    unpacked.write_bytes(b"\x0a" + content[1:])
    with pytest.raises(CorruptArchive, match="has the label 10, expected 0 to 9"):
        cifar10(tiny.parent)


def ask(rank, world_size, root, source, digest):
    original, fetched = cifar.fetch, []

    def fetch(url, path):
        fetched.append(rank)
        time.sleep(0.2)  # long enough for the others to arrive meanwhile
        original(url, path)

    dist.barrier()
    with mock.patch.multiple(cifar, MD5=digest, RECORDS=3, URL=source, fetch=fetch):
        return len(cifar10(root, download=True)), len(fetched)


@pytest.mark.slow
def test_four_ranks_ask_and_one_downloads(ranks, tiny, tmp_path):
    answers = ranks(4, ask, root=tmp_path / "root", source=cifar.URL, digest=cifar.MD5)
    assert [length for length, _ in answers] == [15] * 4
    assert sum(fetched for _, fetched in answers) == 1
