// Runs the page's script against the few parts of a document that it uses, and works it as a user would.
"use strict";
const page = require("fs").readFileSync(process.argv[2], "utf8");
const [data] = page.match(/(?<=<script id="data"[^>]*>)[\s\S]*?(?=<\/script>)/);
const [script] = page.match(/(?<=<script>\n"use strict";)[\s\S]*?(?=<\/script>)/);

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], style: {}, textContent: "", attributes: {}, classList: { toggle() {} } });
  }
  append(...nodes) { this.children.push(...nodes); }
  add(node) { this.children.push(node); }
  replaceChildren(...nodes) { this.children = nodes; }
  setAttribute(key, value) {
    if (/NaN|Infinity|undefined/.test(value)) throw new Error(`<${this.tag} ${key}="${value}">`);
    this.attributes[key] = value;
  }
  getBoundingClientRect() { return { left: 0, width: 480 }; }
  setPointerCapture() {}
  remove() {}
}

const byId = { axis: new Element(), smooth: new Element(), more: new Element(), data: new Element() };
byId.data.textContent = data;
const main = new Element("main");
globalThis.Option = class { constructor(text) { this.text = text; } };
globalThis.document = {
  getElementById: id => byId[id],
  querySelector: () => main,
  createElement: tag => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
};
const { panels, state } = new Function(`${script}; return { panels, state };`)();
const lines = panel => panel.picture.children.find(node => node.tag === "svg").children.length;
const said = panel => panel.names.children.map(node => node.children ? node.children.at(-1) : node);

const seen = { titles: main.children.map(figure => figure.children[0].textContent), lines: panels.map(lines) };
panels[0].picture.onpointermove({ clientX: 480 });
seen.last = panels.map(said);
panels[0].picture.onpointerdown({ clientX: 100 });
panels[0].picture.onpointermove({ clientX: 250 });
panels[0].picture.onpointerup({ clientX: 250 });
seen.zoom = state.zoom;
panels[0].picture.ondblclick();
byId.smooth.oninput({ target: { value: "0.9" } });
byId.axis.value = "iteration";
byId.axis.onchange();
byId.more.value = "learner/lr";
byId.more.onchange();
seen.more = said(panels.at(-1));
main.children.at(-1).children.at(-1).onclick();
seen.panels = panels.length;
panels[5].names.children[0].onclick();
seen.linesWithOneHidden = lines(panels[5]);
console.log(JSON.stringify(seen));
