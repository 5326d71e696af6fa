"""Small tokenizers made here: one token per character, special tokens on top."""

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<turn>", "<end>")
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{{ suffix | default('') }}{% endif %}"
)


def make_tokenizer(template=None, adds_bos=False, eos="<eos>"):
    """A character tokenizer; ``adds_bos``: it puts BOS in front of every text by itself."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token=eos,
        pad_token="<pad>",
        additional_special_tokens=["<turn>", "<end>"],
    )
    fast.chat_template = template
    return fast
