"""Prompt sets of the tiny runs."""


def mixed_lengths() -> list[dict[str, str]]:
    """Two prompts of 14 tokens among prompts of 8: with 6 new tokens only 10 fit into 16."""
    rows = [{"prompt": f"s:{n:05d}=", "answer": "".join(sorted(f"{n:05d}"))} for n in range(10000, 10030)]
    rows[1]["prompt"] = "s:11111111111="
    rows[4]["prompt"] = "s:22222222222="
    return rows


def foreign_characters() -> list[dict[str, str]]:
    return [{"prompt": "s:x=", "answer": "x"}]
