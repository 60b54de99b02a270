"""Files of tensors: packed ones come back as the dequantised weights, in every width, and models load from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from methods.engine.checkpoint_files import is_packed, load_model, load_tensors, pack_file
from tests.helpers import tiny_students


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "wide": torch.randn(6, 128, generator=generator).half(),
        "odd": torch.randn(5, 13, generator=generator).bfloat16(),
        "zero": torch.zeros(3, 64),
        "stack": torch.randn(2, 3, 64, generator=generator),
        "bias": torch.randn(7, generator=generator),
        "ids": torch.arange(12).reshape(3, 4),
    }


@pytest.mark.parametrize(("bits", "group"), [(8, None), (6, 64), (5, 64), (4, 64), (2, None)])
def test_packed_weights_are_close_and_all_else_is_equal(tmp_path: Path, bits: int, group: int | None) -> None:
    file, before = tmp_path / "w.safetensors", tensors()
    save_file(before, file)
    plain = file.stat().st_size
    assert not is_packed(file) and load_tensors(file).keys() == before.keys()
    pack_file(file, bits, group)
    after = load_tensors(file)
    assert is_packed(file) and file.stat().st_size != plain and after.keys() == before.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype and after[key].shape == tensor.shape
        if key in ("zero", "bias", "ids"):
            assert torch.equal(after[key], tensor)
        else:
            rows = tensor.float().reshape(-1, tensor.shape[-1])
            error = (after[key].float().reshape(rows.shape) - rows).square().mean().sqrt()
            assert error < rows.abs().max() / (2 ** (bits - 1) - 1), key


def test_each_code_is_the_nearest_and_bits_have_no_gaps(tmp_path: Path) -> None:
    """Weights that are multiples of the scale come back exactly, in as many bytes as their bits need."""
    file = tmp_path / "w.safetensors"
    weights = torch.tensor([[-15.0, -7.0, 0.0, 1.0, 2.0, 3.0, 14.0, 15.0]]) / 16
    save_file({"w": weights}, file)
    pack_file(file, 5)
    assert torch.equal(load_tensors(file)["w"], weights)
    stored = load_file(file)
    assert stored["w"].numel() == 5 and stored["w.scale"].tolist() == [[1 / 16]]


def test_finer_groups_and_more_bits_err_less(tmp_path: Path) -> None:
    errors = []
    for bits, group in ((4, None), (4, 64), (6, 64), (8, None)):
        save_file(tensors(), file := tmp_path / "w.safetensors")
        pack_file(file, bits, group)
        errors.append(float((load_tensors(file)["wide"].float() - tensors()["wide"].float()).square().sum()))
    assert errors == sorted(errors, reverse=True) and errors[0] > 4 * errors[2]


def test_tensors_can_be_left_out_and_nothing_is_packed_twice(tmp_path: Path) -> None:
    save_file(tensors(), file := tmp_path / "w.safetensors")
    pack_file(file, 8, None, ["od", "bias"])
    assert load_tensors(file).keys() == tensors().keys() - {"odd", "bias"}
    with pytest.raises(ValueError, match="packed already"):
        pack_file(file, 8)


def test_a_packed_model_loads_as_its_dequantised_weights(tmp_path: Path) -> None:
    hf = tiny_students.teacher(torch.float32).hf
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    hf.save_pretrained(plain)
    shutil.copytree(plain, packed)
    pack_file(packed / "model.safetensors", 6, 64)
    save_file(load_tensors(packed / "model.safetensors"), plain / "model.safetensors", {"format": "pt"})
    wanted = load_model(AutoModelForSeq2SeqLM, plain, dtype=torch.float32)
    found, info = load_model(AutoModelForSeq2SeqLM, packed, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and found.name_or_path == str(packed)
    assert found.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert all(torch.equal(*both) for both in zip(found.parameters(), wanted.parameters(), strict=True))
    assert any(not torch.equal(*both) for both in zip(found.parameters(), hf.parameters(), strict=True))
