"""Letter-to-sound rules for English words that no dictionary has, and the names of letters.

A rule is a context before, letters, a context after, and their sounds, in CMUdict's codes. In contexts, `#` is one
vowel letter or more, `:` any number of consonants, `^` one consonant, `+` one of e, i, y, `%` a suffix (er, e, es,
ed, ing, ely), and a blank the edge of the word. The first rule that fits is taken; the last of each letter fits
everywhere.
"""

from __future__ import annotations

import functools
import re

from millstream.text.speech.arpabet import VOWELS

NAMES = {
    "a": "e1", "b": "bi1", "c": "si1", "d": "di1", "e": "i1", "f": "E1f", "g": "ji1", "h": "e1C", "i": "Y1", "j": "je1",
    "k": "ke1", "l": "E1l", "m": "E1m", "n": "E1n", "o": "o1", "p": "pi1", "q": "kyu1", "r": "A1r", "s": "E1s",
    "t": "ti1", "u": "yu1", "v": "vi1", "w": "d^1b^lyu", "x": "E1ks", "y": "wY1", "z": "zi1",
}  # fmt: skip

_CONTEXT = {
    "#": "[aeiouy]+", ":": "[^aeiouy]*", "^": "[^aeiouy]", "+": "[eiy]", "%": "(?:er|ely|es|ed|e|ing)(?![a-z])",
    " ": "(?![a-z])", ".": "[bdgjlmnrvwz]", "&": "(?:s|c|g|z|x|j|ch|sh)", "@": "(?:t|s|r|d|l|z|n|j|th|ch|sh)",
}  # fmt: skip

_RULES = """
 [a] =^|[are] =Ar|[ar]o=^r|[ar]#=Er|^[as]#=es|[a]wa=^|[aw]=O| :[any]=Eni|[a]^+#=e|#:[ally]=^li| [al]#=^l|[again]=^gEn
#:[ag]e=Ij|[a]^+:#=@|:[a]^%=e|[a]^+ =e| [arr]=^r|[arr]=@r| :[ar] =Ar|[ar] =R|[ar]=Ar|[air]=Er|[ai]=e|[ay]=e|[au]=O
#:[al] =^l|#:[als] =^lz|[alk]=Ok|[al]^=Ol| :[able]=eb^l|[able]=^b^l|[ang]+=enj|[ation]=eS^n|[a] =^|[a]=@
b|[bb]=b| [be]^#=bI|[being]=biIN| [both] =boT| [bus]#=bIz|[buil]=bIl|#:[mb] =m|[b]=b
c| [ch]^=k|^e[ch]=k|[chr]=kr|[ch]=C| s[ci]#=sY|[ci]a=S|[ci]o=S|[ci]en=S|[cc]+=ks|[ck]=k|[com]%=k^m|[c]+=s|[cc]=k|[c]=k
d|#:[ded] =dId|.e[d] =d|#^:e[d] =t| [de]^#=dI| [do] =du| [does]=d^z|[dge]=j|[dg]=j|[du]a=ju|[dd]=d|[d]=d
e|#:[e] =|:[e] =i|#[ed] =d|#:[e]d =|[ev]er=Ev|[e]^%=i|[eri]#=iri|[eri]=ErI|#:[er]#=R|[err]=Er|[er]#=Er|[er]=R
 [even]=iv^n
#:[e]w=|@[ew]=u|[ew]=yu|[e]o=i|#:&[es] =Iz|#:[e]s =|#:[ely] =li|#:[ement]=m^nt|[eful]=f^l|[ee]=i|[earn]=Rn| [ear]^=R
[ead]=Ed|#:[ea] =i^|[ea]su=E|[ea]=i|[eigh]=e|[ei]=i| [eye]=Y|[ey]=i|[eu]=yu|#:[en] =^n|#:[el] =^l|#:[ent]=^nt|[e]=E
f|[ful]=f^l|[ff]=f|[f]=f
g|[giv]=gIv| [g]i^=g|[ge]t=gE|su[gges]=gjEs|[gg]=g| b#[g]=g|[g]+=j|[great]=gret|#[gh]=| [gn]=n|[gn] =n|[gh]=g|[g]=g
h| [hav]=h@v| [here]=hir| [hour]=WR|[how]=hW|[h]#=h|[h]=
i| [in]=In| [i] =Y|[in]d=Yn|[ier]=iR|#:r[ied] =id|[ied] =Yd|[ien]=iEn|[ie]t=YE| :[i]%=Y|[i]%=i|[ie]=i|[i]^+:#=I|[ir]#=Yr
[iz]%=Yz|[is]%=Yz|[i]d%=Y|+^[i]^+=I|[i]t%=Y|#^:[i]^+=I|[i]^+=Y|[ir]=R|[igh]=Y|[ild]=Yld|[ign] =Yn|[ign]^=Yn|[ign]%=Yn
[ique]=ik|[ism] =Iz^m|[i] =i|[ia] =i^|[i]o=i|[i]a=i|[i]=I
j|[j]=j
k| [k]n=|[kk]=k|[k]=k
l|[lo]c#=lo|l[l]=|#^:[l]%=^l|[lead]=lid|[l]=l
m|[mov]=muv|[mm]=m|[mc]=m^k|[m]=m
n|e[ng]+=nj|[ng]r=Ng|[ng]#=Ng|[ngl]%=Ng^l|[ng]=N|[nk]=Nk| [now] =nW|[nn]=n|[n]=n
o|[of] =^v|[orough]=Ro|#:[or] =R|#:[ors] =Rz|[or]=Or| [one]=w^n|[ow] =o|[ow]=o| [over]=ovR|[ov]=^v|[o]^%=o|[o]^en=o
[o]^i#=o
[ol]d=ol|[ought]=Ot|[ough]=^f| [ou]=W|h[ou]s#=W|[ous] =^s|[ous]=^s|[our]=Or|[ould]=Ud|^[ou]^l=^|[oup]=up|[ou]=W|[oy]=J
[oing]=oIN|[oi]=J|[oor]=Or|[ook]=Uk|[ood]=Ud|[oo]=u|[o]e=o|[o] =o|[oa]=o| [only]=onli| [once]=w^ns|[on't]=ont|c[o]n=A
[o]ng=O| :^[o]n=A|i[on]=^n|#:[on] =^n|#^[on]=^n|[o]st =o|[of]^=Of|[other]=^DR|[oss] =Os|#^:[om]=^m|[o]=A
p|[ph]=f|[peop]=pip|[pow]=pW|[put] =pUt| [ps]=s| [pn]=n|[pp]=p|[p]=p
q|[quar]=kwOr|[que] =k|[qu]=kw|[q]=k
r| [re]^#=ri|[rh]=r|[rr]=r|[r]=r
s|[sh]=S|#[sion]=Z^n|[some]=s^m|#[sur]#=ZR|[sur]#=SR|#[su]#=Zu|#[ssu]#=Su|#[sed] =zd|#[s]#=z|[said]=sEd|^[sion]=S^n
[ss]=s
.[s] =z|#:.e[s] =z|#^:##[s] =z|#^:#[s] =s|u[s] =s| :#[s] =z| [sch]=sk|[s]c+=|#[sm]=zm|#[sn]'=z^n|[st]le=s|[s]=s
t| [the] =D^|[to] =tu|[that] =D@t| [this] =DIs| [they]=De| [there]=DEr|[ther]=DR|[their]=DEr| [than] =D@n| [them] =DEm
 [these] =Diz| [then]=DEn|[through]=Tru|[those]=Doz|[though] =Do| [thus]=D^s|[th]=T|#:[ted] =tId|s[ti]#n=C|[ti]o=S
[ti]a=S
[tien]=S^n|[tur]#=CR|[tu]a=Cu| [two]=tu|[tch]=C|[tt]=t|[t]=t
u| [un]i=yun| [un]=^n| [upon]=^pOn|@[ur]#=Ur|[ur]#=yUr|[ur]=R|[u]^ =^|[u]^^=^|[uy]=Y| g[u]#=|g[u]%=|g[u]#=w|#n[u]=yu
@[u]=u|[u]=yu
v|[view]=vyu|[v]=v
w| [were]=wR|[wa]s=wA|[wa]t=wA|[where]=wEr|[what]=w^t|[whol]=hol|[who]=hu|[wh]=w|[war]=wOr|[wor]^=wR|[wr]=r|[w]=w
x| [x]=z|[x]=ks
y|[young]=y^N| [you]=yu| [yes]=yEs| [y]=y|#^:[y] =i|#^:[y]i=i| :[y] =Y| :[y]#=Y| :[y]^+:#=I| :[y]^#=Y|[y]=I
z|[zz]=z|[z]=z
"""


@functools.cache
def _rules() -> dict[str, list[tuple[re.Pattern[str] | None, str, re.Pattern[str] | None, str]]]:
    rules: dict[str, list[tuple[re.Pattern[str] | None, str, re.Pattern[str] | None, str]]] = {}
    for rule in _RULES.replace("\n", "|").split("|"):
        if "[" not in rule:
            continue
        before, _, rest = rule.partition("[")
        letters, _, rest = rest.partition("]")
        after, _, sounds = rest.partition("=")
        rules.setdefault(letters[0], []).append((
            re.compile(f"(?:{_context(before, start=True)})\\Z") if before else None,
            letters,
            re.compile(_context(after)) if after else None,
            sounds,
        ))  # fmt: skip
    return rules


def _context(text: str, *, start: bool = False) -> str:
    parts = [_CONTEXT.get(letter, re.escape(letter)) for letter in text]
    if start and text.startswith(" "):
        parts[0] = r"\A"
    return "".join(parts)


def sound_out(word: str) -> str:
    """The codes of a word in lower case, with the primary stress where English has it most often."""
    rules, codes, place = _rules(), [], 0
    while place < len(word):
        for before, letters, after, sounds in rules.get(word[place], ()):
            end = place + len(letters)
            if (
                word.startswith(letters, place)
                and (before is None or before.search(word[:place]))
                and (after is None or after.match(word[end:]))
            ):
                codes.append(sounds)
                place = end
                break
        else:
            place += 1  # a sign that has no sound
    return stressed("".join(codes))


_BEFORE_ENDING = ("S^n", "Z^n", "Ik", "Iks", "Iti", "i^n")
"""Endings that draw the stress to the vowel before them: nation, magic, unity."""


def stressed(code: str) -> str:
    """With a stress on the first vowel that is no schwa; on the third last of long words."""
    places = [place for place, letter in enumerate(code) if letter in VOWELS]
    if not places:
        return code
    if code.endswith(_BEFORE_ENDING) and len(places) >= 2:
        return f"{code[: places[-2] + 1]}1{code[places[-2] + 1 :]}"
    full = [place for place in places if code[place] != "^"] or places
    chosen = full[0]
    if len(places) >= 4:
        chosen = places[-3] if code[places[-3]] != "^" else full[0]
    return f"{code[: chosen + 1]}1{code[chosen + 1 :]}"


def spell(letters: str) -> list[str]:
    """The names of letters, the stress on the last."""
    names = [NAMES[letter] for letter in letters if letter in NAMES]
    return [name.replace("1", "2") for name in names[:-1]] + names[-1:]
