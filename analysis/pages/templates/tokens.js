/* A row, token by token: its answers, and where the chosen head looks from the chosen token. */

const PIXELS = 84;
const make = (tag, className = "", text = "") => {
  const part = document.createElement(tag);
  part.className = className;
  part.textContent = text;
  return part;
};
const formatShare = (share) => `${(100 * share).toFixed(1)}\u00a0%`.replace("-", "−");

class TokenRow {
  constructor(place, row) {
    Object.assign(this, { place, row, head: -1, chosen: row.answers.findIndex(Boolean) });
    this.positions = row.positions;
    this.queries = new Map(row.links.map(([query, ...stored]) => [query, stored]));
    this.looks = make("p", "looks");
    this.looks.setAttribute("aria-live", "polite");
    this.strip = this.buildStrip();
    place.append(this.looks, this.buildLegend(), this.strip);
    this.choose(Math.max(0, this.chosen));
  }

  async addHeads() {
    const { heads, tokens, full } = this.row;
    if (!heads.length) return;
    this.heads = await Promise.all(heads.map(async ({ name, mixer, sources, shares, hidden }) => ({
      name, mixer,
      hidden: hidden ? Array.from(new Int16Array(await inflate(hidden)), (share) => share / full) : [],
      sources: new Uint16Array(await inflate(sources)),
      shares: Float32Array.from(new Int16Array(await inflate(shares)), (share) => share / full),
    })));
    this.kept = this.heads[0].shares.length / tokens.length;
    const menu = make("div", "heads");
    menu.setAttribute("role", "group");
    menu.setAttribute("aria-label", "Heads");
    this.buttons = this.heads.map((head, i) => {
      const button = make("button");
      button.type = "button";
      button.append(this.drawPattern(head), make("span", "", head.name));
      button.addEventListener("click", () => this.pick(i));
      return button;
    });
    menu.append(...this.buttons);
    this.place.prepend(menu);
    this.pick(this.findRecalling());
  }

  /* The head that looks most from queries at their values; without pairs, the last. */
  findRecalling() {
    const toValue = (head) => this.row.links.reduce((sum, [query, , value]) => sum + (
      this.listLooks(head, query).find(([source]) => source === value)?.[1] ?? 0), 0);
    const found = this.heads.map(toValue);
    return this.row.links.length ? found.indexOf(Math.max(...found)) : found.length - 1;
  }

  /* What a head looks at from a token: pairs of source and signed share, largest first. */
  listLooks(head, token) {
    const found = [];
    for (let i = token * this.kept; i < (token + 1) * this.kept; i++) {
      if (head.shares[i] !== 0) found.push([head.sources[i], head.shares[i]]);
    }
    return found;
  }

  drawPattern(head) {
    const canvas = make("canvas"), size = this.row.tokens.length;
    const cells = Math.min(size, 2 * PIXELS);
    canvas.width = canvas.height = cells;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const colors = ["--looks", "--against"].map((name) => style.getPropertyValue(name));
    for (let token = 0; token < size; token++) {
      for (const [source, share] of this.listLooks(head, token)) {
        context.globalAlpha = Math.min(1, Math.sqrt(Math.abs(share)));
        context.fillStyle = colors[+(share < 0)];
        context.fillRect(
          Math.floor((source * cells) / size), Math.floor((token * cells) / size), 1, 1);
      }
    }
    return canvas;
  }

  buildStrip() {
    const { tokens, roles, role_names, colors, answers, targets } = this.row;
    const strip = make("div", "strip");
    strip.tabIndex = 0;
    strip.setAttribute("role", "listbox");
    strip.setAttribute("aria-label", "Tokens of the row");
    this.chips = tokens.map((token, i) => {
      const chip = make("div", "token", token === "" ? " " : token);
      chip.id = `${this.place.id}-${i}`;
      chip.setAttribute("role", "option");
      chip.title = role_names[roles[i]];
      chip.style.setProperty("--role", colors[roles[i]]);
      chip.prepend(make("small", "", `${this.positions[i]}`));
      if (targets[i]) {
        const right = answers[i] === targets[i];
        const text = right ? `✓ ${answers[i]}` : `✗ ${answers[i]}`;
        chip.append(make("small", right ? "answer" : "answer wrong", text));
      }
      chip.addEventListener("pointerenter", () => { if (!this.locked) this.choose(i); });
      chip.addEventListener("click", () => {
        this.locked = this.chosen !== i || !this.locked;
        this.choose(i);
      });
      return chip;
    });
    strip.append(...this.chips);
    strip.addEventListener("keydown", (event) => this.move(event));
    return strip;
  }

  buildLegend() {
    const legend = make("p", "roles");
    this.row.role_names.forEach((name, i) => {
      if (!this.row.roles.includes(i)) return;
      const entry = make("span", "", name), line = make("i");
      line.style.setProperty("--role", this.row.colors[i]);
      entry.prepend(line);
      legend.append(entry);
    });
    const answers = make("span", "", "✓ ✗ the model's answer");
    legend.append(answers);
    if (this.queries.size) {
      const entry = make("span");
      entry.append(make("em", "linked", "ringed"), " the pair that is asked for");
      legend.append(entry);
    }
    return legend;
  }

  move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!by) return;
    event.preventDefault();
    this.locked = true;
    this.choose(Math.min(this.chips.length - 1, Math.max(0, this.chosen + by)));
    this.chips[this.chosen].scrollIntoView({ block: "nearest" });
  }

  pick(head) {
    this.head = head;
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === head));
    this.choose(this.chosen);
  }

  choose(token) {
    this.chosen = token;
    const looks = this.head < 0 ? [] : this.listLooks(this.heads[this.head], token);
    const shares = new Map(looks), linked = this.queries.get(token) ?? [];
    this.chips.forEach((chip, i) => {
      const share = shares.get(i) ?? 0;
      chip.setAttribute("aria-selected", i === token);
      chip.style.setProperty("--share", `${100 * Math.abs(share)}%`);
      chip.style.setProperty("--sign", share < 0 ? "var(--against)" : "var(--looks)");
      chip.classList.toggle("bright", Math.abs(share) > 0.45);
      chip.classList.toggle("linked", linked.includes(i));
    });
    this.strip.setAttribute("aria-activedescendant", this.chips[token].id);
    this.looks.replaceChildren(...this.tell(token, looks));
  }

  tell(token, looks) {
    const { tokens, roles, role_names, answers, targets } = this.row;
    const name = (i) => `${role_names[roles[i]]} ${tokens[i]} at ${this.positions[i]}`;
    const said = [make("b", "", `${name(token)}. `)];
    if (targets[token]) {
      said.push(answers[token] === targets[token]
        ? `The model answers ${answers[token]}, which is right. `
        : `The model answers ${answers[token]}; right would be ${targets[token]}. `);
    }
    if (this.head >= 0) {
      const { name: head, mixer, hidden } = this.heads[this.head];
      const most = looks.slice(0, 4).filter(([, share]) => Math.abs(share) >= 0.005)
        .map(([source, share]) => `${name(source)} (${formatShare(share)})`);
      if (hidden[token] >= 0.005) most.push(`tokens that are not shown (${formatShare(hidden[token])})`);
      const all = [most.slice(0, -1).join(", "), ...most.slice(-1)].filter(Boolean).join(" and ");
      said.push(`From here ${head} (${mixer}) looks at `, all || "no token in particular", ".");
    }
    return said;
  }
}

async function showTokens() {
  for (const script of document.querySelectorAll("[data-tokens]")) {
    const place = document.getElementById(script.dataset.tokens);
    await new TokenRow(place, JSON.parse(script.textContent)).addHeads();
  }
}
