"""The special tokens of models made on the spot. Texts may contain them; each is one token."""

PAD, EOS = "<pad>", "<eos>"


def without_special(text: str) -> str:
    return text.replace(PAD, "").replace(EOS, "")
