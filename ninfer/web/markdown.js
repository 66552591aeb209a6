// Markdown to DOM nodes. Text becomes text nodes and nothing is ever parsed as HTML, so a reply cannot inject any.

function element(tag, children = [], attributes = {}) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Inline: code, strong, emphasis, strike, links. An image is shown as a link: the page loads nothing from elsewhere.
const INLINE = [
  [/^(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, (m) => element("code", [m[2].trim() || m[2]])],
  [/^\*\*(?=\S)([\s\S]*?\S)\*\*/, (m) => element("strong", inline(m[1]))],
  [/^__(?=\S)([\s\S]*?\S)__(?!\w)/, (m) => element("strong", inline(m[1]))],
  [/^\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, (m) => element("em", inline(m[1]))],
  [/^_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)/, (m) => element("em", inline(m[1]))],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (m) => element("del", inline(m[1]))],
  [/^!?\[([^\]]*)\]\((https?:\/\/[^\s)]+)[^)]*\)/, (m) => link(m[2], inline(m[1] || m[2]))],
  [/^<?(https?:\/\/[^\s<>)]*[^\s<>).,;:!?'"])>?/, (m) => link(m[1], [m[1]])],
];

function link(href, children) {
  return element("a", children, { href, target: "_blank", rel: "noopener noreferrer" });
}

function inline(text) {
  const nodes = [];
  let plain = "";
  for (let at = 0; at < text.length; ) {
    const rest = text.slice(at);
    if (/^\\[\\`*_{}[\]()#+\-.!~|<>]/.test(rest)) {
      plain += rest[1];
      at += 2;
      continue;
    }
    const inWord = at > 0 && /\w/.test(text[at - 1]);
    const rule = /^[`*_~![h<]/.test(rest) && INLINE.find(([pattern], i) => !(inWord && /^[_h]/.test(rest)) && pattern.test(rest));
    if (!rule) {
      plain += text[at++];
      continue;
    }
    const found = rest.match(rule[0]);
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(rule[1](found));
    at += found[0].length;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

// Code: comments, strings, numbers and the words that most languages reserve.
const WORDS =
  "and as async await bool break case catch char class const continue def default del do elif else enum export extends " +
  "extern False false finally float fn for from func function if impl import in int interface is lambda let long loop " +
  "match mod mut namespace new nil None not null or package pass private pub public raise return self static struct " +
  "super switch template this throw trait True true try type typedef typename union unsigned use using var void while " +
  "with yield select where insert update delete create table join";
const RESERVED = new Set(WORDS.split(" "));
const TOKEN =
  /(#.*|\/\/.*|\/\*[\s\S]*?(?:\*\/|$)|--\s.*)|("""[\s\S]*?(?:"""|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|`(?:\\.|[^`\\])*`?)|(\b\d[\w.]*)|([A-Za-z_]\w*)|[\s\S]/g;

function coloured(code, language) {
  if (["", "text", "txt", "plain", "markdown", "md"].includes(language)) return [code];
  const nodes = [];
  let plain = "";
  for (const [whole, comment, string, number, word] of code.matchAll(TOKEN)) {
    const kind = comment ? "c" : string ? "s" : number ? "n" : word && RESERVED.has(word) ? "k" : null;
    if (!kind) {
      plain += whole;
      continue;
    }
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(element("span", [whole], { class: `code-${kind}` }));
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function codeBlock(code, language) {
  const copy = element("button", ["Copy"], { type: "button", class: "copy" });
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const bar = element("div", [element("span", [language || "code"]), copy], { class: "bar" });
  return element("div", [bar, element("pre", [element("code", coloured(code, language.toLowerCase()))])], { class: "code" });
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const STARTS = [/^\s*(```|~~~)/, /^#{1,6}\s/, /^\s*>/, ITEM, /^\s*([-*_])(\s*\1){2,}\s*$/];

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
}

function list(lines, start) {
  const [, indent, marker] = lines[start].match(ITEM);
  const ordered = /\d/.test(marker);
  const node = element(ordered ? "ol" : "ul", [], ordered && parseInt(marker) !== 1 ? { start: parseInt(marker) } : {});
  let at = start;
  while (at < lines.length) {
    const found = lines[at].match(ITEM);
    if (!found || found[1].length < indent.length || /\d/.test(found[2]) !== ordered) break;
    const inner = [found[3]];
    const width = indent.length + 1;
    at++;
    while (at < lines.length) {
      const line = lines[at];
      const deeper = line.length - line.trimStart().length >= width;
      if (!line.trim()) {
        const next = lines[at + 1] ?? "";
        if (!(next.trim() && next.length - next.trimStart().length >= width)) break;
      } else if (!deeper && STARTS.some((start) => start.test(line))) break;
      else if (!deeper && !inner.at(-1).trim()) break;
      inner.push(line);
      at++;
    }
    const margin = Math.min(...inner.slice(1).filter((l) => l.trim()).map((l) => l.length - l.trimStart().length), 99);
    const blocks = [...render(inner.map((l, i) => (i ? l.slice(Math.min(margin, l.length)) : l)).join("\n")).childNodes];
    if (blocks[0]?.tagName === "P") blocks.splice(0, 1, ...blocks[0].childNodes); // tight
    node.append(element("li", blocks));
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++;
  }
  return [node, at];
}

// A document fragment. An unclosed fence is a code block that goes on to the end: replies arrive in pieces.
export function render(text) {
  const out = document.createDocumentFragment();
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const fence = line.match(/^(\s*)(```+|~~~+)\s*([^\s`]*)/);
    if (fence) {
      let end = at + 1;
      while (end < lines.length && !lines[end].trim().startsWith(fence[2])) end++;
      const code = lines.slice(at + 1, end).map((l) => (l.startsWith(fence[1]) ? l.slice(fence[1].length) : l));
      out.append(codeBlock(code.join("\n"), fence[3]));
      at = end + 1;
    } else if (!line.trim()) {
      at++;
    } else if (/^#{1,6}\s/.test(line)) {
      const [, marks, title] = line.match(/^(#+)\s+(.*?)\s*#*$/) ?? [null, "#", line];
      out.append(element(`h${Math.min(6, marks.length + 1)}`, inline(title)));
      at++;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      out.append(element("hr"));
      at++;
    } else if (/^\s*>/.test(line)) {
      let end = at;
      while (end < lines.length && /^\s*>/.test(lines[end])) end++;
      out.append(element("blockquote", [render(lines.slice(at, end).map((l) => l.replace(/^\s*> ?/, "")).join("\n"))]));
      at = end;
    } else if (ITEM.test(line)) {
      const [node, end] = list(lines, at);
      out.append(node);
      at = end;
    } else if (line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[at + 1] ?? "")) {
      const head = element("tr", cells(line).map((c) => element("th", inline(c))));
      let end = at + 2;
      const rows = [];
      while (end < lines.length && lines[end].includes("|")) {
        rows.push(element("tr", cells(lines[end++]).map((c) => element("td", inline(c)))));
      }
      const table = element("table", [element("thead", [head]), element("tbody", rows)]);
      out.append(element("div", [table], { class: "scroll" }));
      at = end;
    } else {
      let end = at + 1;
      while (end < lines.length && lines[end].trim() && !STARTS.some((start) => start.test(lines[end]))) end++;
      out.append(element("p", inline(lines.slice(at, end).join("\n"))));
      at = end;
    }
  }
  return out;
}
