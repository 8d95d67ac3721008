"""Tokenizers that are trained in a second on the texts of an example, for models that are trained from scratch.

Each function gives a `PreTrainedTokenizerFast`, as `AutoTokenizer.from_pretrained` would, and learns the same
vocabulary from the same texts in every run.
"""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BERT_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def train_wordpiece(texts, vocab_size=4000, max_tokens=48):
    """A lower-casing WordPiece tokenizer, as BERT has.

    Parameters:
        texts: a list of strings to learn the vocabulary from.
        vocab_size: tokens at most.
        max_tokens: where truncation=True cuts a text.
    """
    normalizer = normalizers.BertNormalizer()
    characters = sorted({character for text in texts for character in normalizer.normalize_str(text)} - {" "})
    # The trainer numbers the "##x" pieces in the order in which a hash map yields them and breaks ties by number.
    # Numbered beforehand, they give the same vocabulary in every run.
    pieces = [*BERT_TOKENS.values(), *(f"##{character}" for character in characters)]
    learner = Tokenizer(models.WordPiece(unk_token=BERT_TOKENS["unk"]))
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    learner.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=pieces, show_progress=False)
    )

    # A second tokenizer takes the vocabulary over, since to the first one the numbered pieces are special tokens.
    vocabulary = learner.get_vocab()
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=BERT_TOKENS["unk"]))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    separator, start = (BERT_TOKENS[name] for name in ("sep", "cls"))
    tokenizer.post_processor = processors.BertProcessing((separator, vocabulary[separator]), (start, vocabulary[start]))
    names = {f"{name}_token": token for name, token in BERT_TOKENS.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_tokens, **names)


def train_byte_level_bpe(texts, vocab_size=4000, max_tokens=128, ends_texts=False):
    """A byte-level BPE tokenizer, as GPT-2 has: no text is unknown to it, and decoding gives the text back.

    Parameters:
        texts: a list of strings to learn the merges from.
        vocab_size: tokens at most, 256 bytes and three special ones among them.
        max_tokens: where truncation=True cuts a text.
        ends_texts: whether each text gets the end token behind it, as encoders and decoders of sequence-to-sequence
            models expect. A causal model's script puts it between its documents itself.
    """
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special.values()),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    if ends_texts:
        end = special["eos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_tokens, **special)
