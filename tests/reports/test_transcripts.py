from gym_rm.reports.transcripts import print_transcripts, transcript

CONVERSATION = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four\n\tindeed"}]


def test_a_transcript_has_title_messages_and_outcome():
    text = transcript(CONVERSATION, title="prompt 7", outcome="reward 1")
    assert text == "--- prompt 7\nuser: 2 + 2?\nassistant: four\n\tindeed\n--- reward 1"


def test_control_characters_are_escaped():
    text = transcript([{"role": "user", "content": "\x1b[2J\x07\r\x9b31m\x00"}], title="t")
    assert text.splitlines()[1] == r"user: \x1b[2J\x07\x0d\x9b31m\x00"


def test_only_the_first_transcripts_are_printed(capsys):
    print_transcripts([transcript(CONVERSATION, title=str(index)) for index in range(5)], most=2)
    out = capsys.readouterr().out
    assert "--- 1" in out
    assert "--- 2" not in out
    assert "and 3 more" in out


def test_brackets_are_printed_as_text(capsys):
    print_transcripts([transcript([{"role": "user", "content": "[red]x[/red]"}], title="t")])
    assert "[red]x[/red]" in capsys.readouterr().out
