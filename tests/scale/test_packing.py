"""Packed documents: attention stays inside each, all else is unchanged; padding is what it wastes."""

import json
from dataclasses import replace

import pytest
import torch

from labkit.scale import constants
from labkit.scale.answer import answer, model_flops
from labkit.scale.cost import layer_parts, other_seconds, predict_step
from labkit.scale.documents import Documents, documents_of
from labkit.scale.job_config import job_of
from labkit.scale.memory_model import predict_memory
from labkit.scale.model_row import row_of
from labkit.scale.published_rows import published, speed

C = constants.values()
LLAMA = dict(row_of("llama3-8b")) | {"gpu": "H100", "n_gpus": 8, "zero": 1, "seq_len": 32768}
SMALL = "layers=8,hidden=1024,heads=8,kv_heads=4,ffn=4096,vocab=8192,seq_len=2048"


def unmasked(lengths, causal):
    """Count the pairs of query and key that the mask of packed documents keeps, one by one."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = document[:, None] == document[None, :]
    return int((mask.tril() if causal else mask).sum())


@pytest.mark.parametrize("model", ["llama3-8b", "bert-large"])
@pytest.mark.parametrize("lengths", [[64] * 8, [300, 100, 50, 50, 10, 2], [512]])
def test_flops_of_attention_are_those_of_the_mask(model, lengths, tmp_path):
    """Two products of 2 FLOPs a pair and element; a causal token meets itself, which the half leaves out."""
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, lengths)))
    job = job_of(dict(row_of(model)) | {"gpu": "H100", "seq_len": 512, "documents": str(file)})
    shape, causal = job.shape, model == "llama3-8b"
    pairs = unmasked(lengths, causal) - causal * sum(lengths) / 2
    flops = 2 * 2 * shape.hidden * pairs
    assert sum(lengths) * shape.attention_flops(job.reach) == pytest.approx(flops)


def test_only_attention_takes_less_time():
    """Two nodes of 8, tp 2 and cp 2, so that a layer has all its messages."""
    one = job_of(LLAMA | {"n_gpus": 16, "tp": 2, "cp": 2, "zero": 3, "stack": "torchtitan"})
    packed = replace(one, documents=documents_of("2048", 32768))
    spent, less = layer_parts(one, C), layer_parts(packed, C)
    attention, moving, scores = other_seconds(one, C)
    assert other_seconds(packed, C) == (attention / 16, moving, scores)
    assert spent["layers"] - less["layers"] == pytest.approx(3.5 * attention * 15 / 16)
    assert less["messages of layers"] == spent["messages of layers"]
    assert predict_memory(packed, C) == predict_memory(one, C)
    assert packed.step_tokens == one.step_tokens


def test_documents_as_long_as_a_sequence_change_nothing():
    one = job_of(LLAMA)
    for length in ("32768", "65536"):  # two pieces of 32,768
        same = job_of(LLAMA | {"documents": length})
        assert predict_step(same, C) == predict_step(one, C) and model_flops(same) == model_flops(one)


def test_a_step_is_one_of_documents_alone_and_longer_messages():
    """16 sequences of 2,048 and one of 32,768 with 16 documents have the same tokens and the same attention."""
    packed = predict_step(job_of(LLAMA | {"documents": 2048, "micro_batch": 1, "grad_accum": 4}), C)
    alone = predict_step(job_of(LLAMA | {"seq_len": 2048, "micro_batch": 16, "grad_accum": 4}), C)
    assert packed.parts == pytest.approx(alone.parts)


def test_longer_documents_weigh_more_than_their_number(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("1000 3000\n")
    assert documents_of(str(file), 8192) == Documents(2000, (1000**2 + 3000**2) / 4000)
    assert documents_of(str(file), 2000) == Documents(4000 / 3, (2 * 1000**2 + 2000**2) / 4000)  # cut: 2,000 + 1,000
    assert documents_of("", 8192) is None


def test_padding_wastes_what_a_published_histogram_says():
    """Krell et al., 2021: without padding, BERT's 512-token sequences of Wikipedia are at most 2.0013 times as fast."""
    mean = 512 / 2.0013
    assert Documents(mean, mean).wasted(512) == pytest.approx(0.5003, abs=1e-4)
    found = answer("bert-large", 8, "a100", documents=256, changes=False).packing
    packed, padded = found["document_tokens"], found["padded_tokens_per_second_per_gpu"]
    assert (packed, found["padding"]) == (256, 0.5)
    speed = answer("bert-large", 8, "a100", documents=256, changes=False).best.step.tokens_per_second
    assert 2.0 < speed / padded < 2.2  # more than 2, as attention is shorter, too


def test_packing_is_said_to_save_more_than_nemo_publishes():
    """LLaMA 2 7B at 4,096 tokens: SFT on packed SQuAD, 17,120 tokens/s, and pretraining, 16,847 (documents.py)."""
    rows = {row["row"]: row for row in published() if row["source"] == "NeMo-24.07"}
    tuned, pretrained = rows["nemo-SFT-7B"], rows["nemo-L2-7B"]
    assert float(tuned["tok_s_gpu"]) / float(pretrained["tok_s_gpu"]) == pytest.approx(1.02, abs=0.005)
    packed, one = (speed(job_of(tuned | {"documents": length}), C) for length in ("200", ""))
    before = speed(pretrained["job"], C)
    assert one / before < 1.016 < packed / before == pytest.approx(1.14, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"documents": "many"}, "documents must be the tokens of a document, such as 2048, or a file"),
        ({"documents": "0"}, "documents must be the tokens of a document"),
        ({"documents": "2048", "gpu": "V100", "precision": "fp16"}, "documents needs FlashAttention, which megatron"),
        ({"documents": "64", "architecture": "vit"}, "documents are of text, but a vision transformer has images"),
    ],
)
def test_what_cannot_be_packed_is_one_line(changes, line):
    with pytest.raises(ValueError) as error:
        job_of(LLAMA | changes)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "got"), [("12 -3", "'-3'"), ("12 1.5", "'1.5'"), (" \n", "'nothing'")])
def test_a_file_of_lengths_has_whole_numbers(tmp_path, text, got):
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"lengths\.txt must have whole numbers of tokens, at least 1, got {got}"):
        documents_of(str(file), 2048)


def test_the_answer_says_what_packing_saves():
    found = answer(SMALL, 8, "h100", documents=512, stack="megatron")
    told, job = json.loads(found.to_json())["packing"], found.best.job
    alone = predict_step(replace(job, documents=None), C).tokens_per_second
    assert told == {"document_tokens": 512, "attention_reach": 512, "padding": 0.75,
                    "padded_tokens_per_second_per_gpu": alone / 4}  # fmt: skip
    line = next(words for words in found.sentences() if words.startswith("Packed: "))
    assert "4 documents of 512 tokens a sequence; attention inside each takes 0.25 of its FLOPs" in line
    assert f"would waste 75% of the tokens: {alone / 4:,.0f} useful tokens/s a GPU" in line
    assert found.options()[-1].endswith("PackedSequenceSpecs(packed_sequence_size=2048)")
    assert "no published row says how long its packed documents are" in found.sentences()[-1]
    longer = next(one.found.job for one in found.changes if one.what.startswith("4,096 tokens a sequence"))
    assert (longer.context, longer.documents) == (4096, Documents(512, 512))


def test_an_answer_without_documents_is_as_before():
    found = answer(SMALL, 8, "h100", changes=False)
    assert found.packing is None and "packed" not in "\n".join([*found.sentences(), *found.options()])
