"""Words that are said in two ways, told apart by the words around them, and words that are weak in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.text.speech.word_list import listed

_BE = listed("am is are was were be been being get gets got gotten isn't wasn't weren't aren't")
_HAVE = listed("have has had having i've you've we've they've he's she's haven't hasn't hadn't")
_MODAL = listed(
    "to will would can could shall should may might must do does did don't doesn't didn't can't couldn't won't "
    "wouldn't shouldn't i'll you'll we'll they'll he'll she'll it'll let's please i you we they who"
)
_ARTICLE = listed(
    "the a an this that these those my your his her its our their some any no every each in of on at from with "
    "new old big small large great good bad first last next one two three"
)
_PRONOUNS = listed("i you we they who")
_PAST = listed("yesterday ago already last before earlier once never ever just")


@dataclass(frozen=True, slots=True)
class _Two:
    noun: str
    verb: str


_BY_CLASS = {
    "record": _Two("rE1kRd", "r^kO1rd"), "records": _Two("rE1kRdz", "r^kO1rdz"),
    "present": _Two("prE1z^nt", "pr^zE1nt"),
    "presents": _Two("prE1z^nts", "pr^zE1nts"), "object": _Two("A1bjEkt", "^bjE1kt"),
    "objects": _Two("A1bjEkts", "^bjE1kts"),
    "project": _Two("prA1jEkt", "pr^jE1kt"), "projects": _Two("prA1jEkts", "pr^jE1kts"),
    "produce": _Two("pro1dus", "pr^du1s"),
    "contract": _Two("kA1ntr@kt", "k^ntr@1kt"), "conduct": _Two("kA1nd^kt", "k^nd^1kt"),
    "content": _Two("kA1ntEnt", "k^ntE1nt"),
    "contest": _Two("kA1ntEst", "k^ntE1st"), "conflict": _Two("kA1nflIkt", "k^nflI1kt"),
    "convert": _Two("kA1nvRt", "k^nvR1t"),
    "desert": _Two("dE1zRt", "dIzR1t"), "export": _Two("E1kspOrt", "IkspO1rt"), "import": _Two("I1mpOrt", "ImpO1rt"),
    "increase": _Two("I1nkris", "Inkri1s"), "increases": _Two("I1nkris^z", "Inkri1s^z"),
    "decrease": _Two("di1kris", "dIkri1s"),
    "insult": _Two("I1ns^lt", "Ins^1lt"), "permit": _Two("pR1mIt", "pRmI1t"), "progress": _Two("prA1grEs", "pr^grE1s"),
    "protest": _Two("pro1tEst", "pr^tE1st"), "rebel": _Two("rE1b^l", "rIbE1l"), "refuse": _Two("rE1fyus", "r^fyu1z"),
    "reject": _Two("ri1jEkt", "rIjE1kt"), "research": _Two("ri1sR2C", "ri1sR2C"),
    "subject": _Two("s^1bjIkt", "s^bjE1kt"),
    "suspect": _Two("s^1spEkt", "s^spE1kt"), "transfer": _Two("tr@1nsfR", "tr@nsfR1"),
    "upset": _Two("^1psEt", "^psE1t"),
    "house": _Two("hW1s", "hW1z"), "excuse": _Two("Ikskyu1s", "Ikskyu1z"),
    "abuse": _Two("^byu1s", "^byu1z"), "close": _Two("klo1z", "klo1z"), "estimate": _Two("E1st^m^t", "E1st^me2t"),
    "separate": _Two("sE1pr^t", "sE1pRe2t"), "duplicate": _Two("du1pl^k^t", "du1pl^ke2t"),
    "graduate": _Two("gr@1ju^t", "gr@1jue2t"),
    "alternate": _Two("O1ltRn^t", "O1ltRne2t"), "moderate": _Two("mA1dR^t", "mA1dRe2t"),
    "minute": _Two("mI1n^t", "mI1n^t"),
    "address": _Two("@1drEs", "^drE1s"), "attribute": _Two("@1tr^byut", "^trI1byut"),
    "perfect": _Two("pR1fIkt", "pRfE1kt"),
    "lives": _Two("lY1vz", "lI1vz"), "dove": _Two("d^1v", "do1v"), "wound": _Two("wu1nd", "wu1nd"),
}  # fmt: skip


def choose(word: str, before: str, after: str, sentence: frozenset[str]) -> str | None:
    """The codes of a word that is said in two ways; None for all others. `before` and `after`: its neighbours, in lower
    case. `sentence`: all of its words."""
    if word in _BY_CLASS:
        two = _BY_CLASS[word]
        return two.verb if before in _MODAL else two.noun
    if word == "use":
        return "yu1s" if before in _ARTICLE else "yu1z"
    if word == "read":
        if before in _MODAL and before not in _PRONOUNS:
            return "ri1d"
        return "rE1d" if before in _HAVE or before in _BE or sentence & _PAST else "ri1d"
    if word == "live":
        return "lY1v" if before in _ARTICLE or after in ("music", "stream", "show", "audio", "tv") else "lI1v"
    if word == "lead":
        return "lE1d" if after in ("pipe", "pipes", "paint", "poisoning") or before == "of" else "li1d"
    if word == "tear":
        return "tE1r" if before in _MODAL or after in ("down", "up", "apart") else "ti1r"
    if word == "wind":
        return "wY1nd" if before in _MODAL or after == "up" else "wI1nd"
    if word == "bow":
        return "bW1" if before in _MODAL else "bo1"
    if word == "close" and after in ("to", "by", "enough"):
        return "klo1s"
    return None


_WEAK = {
    "a": "ɐ", "an": "ən", "the": "ðə", "and": "ænd", "or": "ɔɹ", "but": "bʌt", "of": "ʌv", "to": "tə", "in": "ɪn",
    "on": "ɔn", "at": "æt", "by": "bI", "for": "fɔɹ", "from": "fɹʌm", "with": "wɪð", "as": "æz", "is": "ɪz",
    "are": "ɑɹ",
    "was": "wʌz", "were": "wɜɹ", "be": "bi", "been": "bɪn", "am": "æm", "has": "hæz", "have": "hæv", "had": "hæd",
    "do": "du", "does": "dʌz", "did": "dɪd", "can": "kæn", "will": "wɪl", "would": "wʊd", "could": "kʊd",
    "should": "ʃʊd", "i": "ˌI", "you": "ju", "he": "hi", "she": "ʃi", "it": "ɪt", "we": "wi", "they": "ðA", "me": "mi",
    "him": "hɪm", "her": "hɜɹ", "us": "ʌs", "them": "ðɛm", "my": "mI", "your": "jʊɹ", "his": "hɪz", "its": "ɪts",
    "our": "ˌWɹ", "their": "ðɛɹ", "this": "ðɪs", "that": "ðæt", "these": "ðiz", "those": "ðOz", "if": "ɪf",
    "than": "ðæn", "so": "sO", "i'm": "ˌIm", "it's": "ɪts", "that's": "ðæts", "you're": "jʊɹ", "we're": "wɪɹ",
    "they're": "ðɛɹ",
}  # fmt: skip
_TO_BRITISH = (
    ("ɔɹ", "ɔː"), ("ɑɹ", "ɑː"), ("wɜɹ", "wɜː"), ("hɜɹ", "hɜː"), ("jʊɹ", "jɔː"), ("ðɛɹ", "ðɛː"), ("ˌWɹ", "ˌWə"),
    ("wɪɹ", "wɪə"), ("æ", "a"), ("ɔn", "ɒn"), ("ʌv", "ɒv"), ("ʌm", "ɒm"), ("wʌz", "wɒz"), ("O", "Q"), ("bɪn", "biːn"),
)  # fmt: skip


def weak(word: str, after_is_vowel: bool, *, british: bool) -> str | None:
    """A small word as it is said within a sentence, without stress. None for all others."""
    if word == "the" and after_is_vowel:
        return "ði"
    if word == "to" and after_is_vowel:
        return "tʊ"
    found = _WEAK.get(word)
    if found is not None and british:
        for american, said in _TO_BRITISH:
            found = found.replace(american, said)
    return found
