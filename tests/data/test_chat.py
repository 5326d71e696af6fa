import pytest

from gspo.data.chat import Rendering, closing_ids, render_prompt
from gspo.errors import DataError

from .tokenizers import TEMPLATE, make_tokenizer

CHAT = ({"role": "user", "content": "hi"},)


def text(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "")


@pytest.fixture(scope="module")
def plain():
    return make_tokenizer()


@pytest.fixture(scope="module")
def chat():
    return make_tokenizer(TEMPLATE)


@pytest.mark.parametrize(
    ("template_emits", "tokenizer_adds", "count"),
    [(True, True, 1), (False, True, 1), (True, False, 1), (False, False, 0)],  # case G14
)
def test_bos_exactly_once(template_emits, tokenizer_adds, count):
    tokenizer = make_tokenizer(("<bos>" if template_emits else "") + TEMPLATE, adds_bos=tokenizer_adds)
    ids = render_prompt(tokenizer, CHAT)
    assert ids.count(tokenizer.bos_token_id) == count
    assert (ids[0] == tokenizer.bos_token_id) is bool(count)


@pytest.mark.parametrize(("adds", "count"), [(True, 1), (False, 0)])
def test_bos_of_plain_text(adds, count):
    tokenizer = make_tokenizer(adds_bos=adds)
    assert render_prompt(tokenizer, "2+2=").count(tokenizer.bos_token_id) == count
    assert render_prompt(tokenizer, "<bos>2+2=").count(tokenizer.bos_token_id) == 1


def test_messages_go_through_the_template(chat):
    assert text(chat, render_prompt(chat, CHAT)) == "<turn>user\nhi<end>\n<turn>assistant\n"


def test_text_is_a_user_message_if_there_is_a_template(chat, plain):
    assert render_prompt(chat, "hi") == render_prompt(chat, CHAT)
    assert text(plain, render_prompt(plain, "hi")) == "hi"
    assert text(chat, render_prompt(chat, "hi", Rendering("never"))) == "hi"


def test_instruction_system_prompt_and_options(chat):
    rendering = Rendering(system_prompt="S", instruction="!", template_options={"suffix": "T"})
    expected = "<turn>system\nS<end>\n<turn>user\nhi!<end>\n<turn>assistant\nT"
    assert text(chat, render_prompt(chat, "hi", rendering)) == expected


def test_the_datas_own_system_message_is_kept(chat):
    messages = ({"role": "system", "content": "own"}, *CHAT)
    shown = text(chat, render_prompt(chat, messages, Rendering(system_prompt="S")))
    assert "own" in shown
    assert "S" not in shown


@pytest.mark.parametrize(
    ("content", "rendering", "message"),
    [
        (CHAT, Rendering(), "row 3 holds chat messages, but the tokenizer has no chat template"),
        ("hi", Rendering("always"), 'row 3 is text with chat_template = "always", but the tokenizer has no'),
        (CHAT, Rendering("never"), "row 3 holds chat messages, which need a chat template"),
        ("hi", Rendering(system_prompt="S"), "row 3: a system_prompt needs a chat template"),
        ("hi", Rendering(template_options={"a": 1}), "row 3: template_options need a chat template"),
        ("", Rendering(), "row 3 has no tokens"),
    ],
)
def test_what_needs_a_template_says_so(plain, content, rendering, message):
    with pytest.raises(DataError, match=message):
        render_prompt(plain, content, rendering, "row 3")


def test_a_template_that_refuses_is_named():
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="row 3: the chat template refuses the messages: roles must alternate"):
        render_prompt(tokenizer, CHAT, where="row 3")


def test_closing_ids(chat, plain):
    assert closing_ids(chat, chat=True) == (chat.convert_tokens_to_ids("<end>"),)
    assert closing_ids(chat, chat=False) == (chat.eos_token_id,)
    assert closing_ids(plain, chat=True) == (plain.eos_token_id,)
    with pytest.raises(DataError, match="no end-of-text token"):
        closing_ids(make_tokenizer(eos=None), chat=False)
