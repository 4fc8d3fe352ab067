"""The package's README works as it stands."""

import re
from pathlib import Path

from kvtier_llamacpp import Engine

README = Path(__file__).parents[2] / "plugins/kvtier-llamacpp/README.md"
BLOCK = re.compile(r"<!-- test: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)


def test_the_readme_restores_its_prompt(model, tmp_path, monkeypatch, capsys):
    blocks = dict(BLOCK.findall(README.read_text()))
    assert set(blocks) == {"kvtier.toml", "python", "llama-cpp-python"}
    monkeypatch.chdir(tmp_path)
    Path("kvtier.toml").write_text(blocks["kvtier.toml"].replace("1GiB", "64MiB"))
    Path("MODEL.gguf").symlink_to(model)
    code = compile(blocks["python"], "README.md", "exec")
    close = Engine.close

    def close_when_stored(self: Engine) -> None:
        assert self.flush()
        close(self)

    monkeypatch.setattr(Engine, "close", close_when_stored)
    answers = []
    for _ in range(2):
        exec(code, {})  # our own README
        answers.append(capsys.readouterr().out.rsplit("\n", 2))
    assert answers[0][0] == answers[1][0]
    assert answers[0][1].startswith("{} ")
    assert answers[1][1].startswith("{'disk': ")
