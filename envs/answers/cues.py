"""Words beside an answer, in languages that models reply in: what announces it and what takes it back."""

from __future__ import annotations

import re
from collections.abc import Iterator

CUE = re.compile("|".join((
    r"\b(?:answers?|ans(?=[.:])|solution|antwort|lösung|réponse|respuesta|solución|opción|resposta|solução|opção|"
    r"alternativa|risposta|soluzione|antwoord|odpowiedź|odpověď|svar(?:et)?|vastaus|cevap|jawaban\w*|ответ|"
    r"відповідь|απάντηση|đáp án)\b",
    "उत्तर|答案|答え|答|回答|选项|正解|정답|답|الإجابة|الجواب|התשובה|תשובה|پاسخ|ค(?:ำ|ํา)ตอบ")), re.IGNORECASE)
# What may stand between a cue and the answer, beside marks and single letters ("the answer is x = 42").
LINKS = set("""
    is are was be must should would equals equal to therefore thus then so the correct right
    final best approximately about roughly exactly simply clearly definitely option
    choice letter number value ist lautet die der das richtige est la es é è el là
    correcta correcto correcte bonne corretta corretto correta correto letra finale это
    är đúng yang benar adalah 是 为 為 は です 은 는 هو هي الصحيحة היא है""".split())
# An answer that is announced in order to be refused: "the wrong answer is B".
_OTHERS = re.compile(r"\b(?:wrong|incorrect|false|first|initial|previous|other|possible|all|both|these|those|"
                     r"my first|common|tempting)\s+$", re.IGNORECASE)
# What takes back an answer that stands before it.
WITHDRAWN = re.compile("|".join((
    r"\b(?:wait|hmm|oops|sorry|correction|scratch that|on second thought|let me re\w+|re-?check\w*|however|"
    r"nein|double-?check\w*|reconsider\w*|i made an? (?:error|mistake)|(?:it|that) should be|"
    r"it is actually)\b",
    r"\b(?:this|that|it|which) (?:is|was) (?:wrong|incorrect|not right)\b",
    r"(?:^|[.!?;:,\n…—-])\s{0,3}(?:actually\b|no[,.!]|no wait)",
    "不对|不對|错了|错误")), re.IGNORECASE)
_TOKEN = re.compile(r"[^\W\d_]+|\d|[\W_]")
_MOST_BETWEEN = 40  # tokens between a cue and the answer
_MOST_CUES = 20


def cues(text: str, letters: bool = True) -> Iterator[tuple[re.Match, int]]:
    """From the last one on: each cue, and where what it announces begins at the latest. letters: single ones
    are names, as in "the answer is x = 42"
    """
    for cue in [*CUE.finditer(text)][:-_MOST_CUES - 1:-1]:
        if _OTHERS.search(text[max(cue.start() - 20, 0):cue.start()]):
            continue
        end = cue.end()
        for count, token in enumerate(_TOKEN.finditer(text, cue.end())):
            word, end = token[0], token.start()
            is_mark = re.fullmatch(r"[\W_]", word)
            is_name = letters and len(word) == 1 and word.isalpha()
            if not (is_mark or is_name or word.lower() in LINKS) or count == _MOST_BETWEEN:
                break
        yield cue, end
