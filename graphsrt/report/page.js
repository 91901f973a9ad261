"use strict";
(() => {
  // -- data ------------------------------------------------------------------------------------------------------
  // Rows, texts and stages as graphsrt/report/stages.py describes them. A character from RELATIVE on stands for the
  // number of a layer, counted from the layer that the row is shown in.
  const data = JSON.parse(document.getElementById("data").textContent);
  const RELATIVE = 0xe400;
  const MARKS = /[\uE000-\uE8FF]/g;
  const [NAME, TYPE, EXPRESSION, MADE_BY, SOURCE, MODULE, USES, COMPLETE] = [0, 1, 2, 3, 4, 5, 6, 7];
  const COLLECTIVES = new Set(["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "take_own"]);

  const byId = (id) => document.getElementById(id);
  const fill = (text, layer) =>
    layer === null ? text : text.replace(MARKS, (c) => String(layer + c.charCodeAt(0) - RELATIVE));
  const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "class") made.className = value;
      else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  }

  const SVG = byId("svg-prototype").namespaceURI;
  function drawn(tag, attributes, ...children) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const patterns = new Map();
  function ownPath(prefix) {
    if (!patterns.has(prefix)) {
      const escaped = prefix.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
      patterns.set(prefix, new RegExp(`("?)(?:[\\w.]*\\.)?${escaped}${String.fromCharCode(RELATIVE)}\\.(?=\\w)`, "g"));
    }
    return patterns.get(prefix);
  }

  // Names inside a layer are shown without the layer's own path, as the folded view in a terminal shows them.
  function shown(text, segment, layer, whole = false) {
    if (segment.layer === null || whole) return fill(text, layer);
    return fill(text.replace(ownPath(segment.prefix), (_, quote) => (quote ? '"…' : "")), layer);
  }

  const stages = data.stages.map((stage) => ({
    ...stage,
    segments: stage.segments.map(([layer, prefix, text], index) => ({ layer, prefix, text, index })),
  }));
  const pathOf = (segment, layer = segment.layer) => `${segment.prefix}${layer}`;

  function titleOf(stage, segment) {
    if (segment.layer !== null) return pathOf(segment);
    const first = stage.segments[0] === segment;
    const last = stage.segments[stage.segments.length - 1] === segment;
    return first && last ? "operators" : first ? "before the layers" : last ? "after the layers" : "between layers";
  }

  function span(layers) {
    return layers.length === 1 ? `layer ${layers[0]}` : `layers ${layers[0]}–${layers[layers.length - 1]}`;
  }

  const complete = (row) => row.join("\u001f"); // what a search looks through

  // -- lines -----------------------------------------------------------------------------------------------------
  const WIDEST = [44, 40, 100];

  function columns(rows, segment, layer, whole) {
    const cells = rows.map((row) => [NAME, TYPE, EXPRESSION].map((field) => shown(row[field], segment, layer, whole)));
    const widths = WIDEST.map((limit, field) =>
      Math.max(0, ...cells.map((cell) => cell[field].length).filter((length) => length <= limit)));
    return { cells, widths };
  }

  function marked(text, query) {
    if (!query) return [text];
    const parts = [];
    const lower = text.toLowerCase();
    let at = 0;
    for (let found = lower.indexOf(query); found >= 0; found = lower.indexOf(query, at)) {
      parts.push(text.slice(at, found), element("mark", {}, text.slice(found, found + query.length)));
      at = found + query.length;
    }
    parts.push(text.slice(at));
    return parts;
  }

  function detail(row, layer) {
    const parts = [
      row[MADE_BY] && `made by ${row[MADE_BY]}`, row[SOURCE], row[MODULE] && `in ${fill(row[MODULE], layer)}`,
      row[COMPLETE] && `complete type ${row[COMPLETE]}`,
    ].filter(Boolean);
    return parts.join(" · ");
  }

  function lineOf(row, cell, widths, layer, query, sources) {
    const by = row[MADE_BY].split(", ").pop();
    const comment = [by, sources && row[SOURCE]].filter(Boolean).join(" · ");
    const line = element("div", { class: "line", title: detail(row, layer) || undefined });
    const pad = (field) => element("span", { class: "pad" }, " ".repeat(Math.max(0, widths[field] - cell[field].length)));
    line.append(...marked(`${cell[0]}:`, query), " ", pad(0), element("span", { class: "t" }, ...marked(cell[1], query)));
    line.append(pad(1), " = ", ...marked(cell[2], query));
    if (comment) line.append(pad(2), "  ", element("span", { class: "c" }, "# ", ...marked(comment, query)));
    return line;
  }

  function codeOf(rows, segment, layer, { query = "", sources = false, matching = false } = {}) {
    const kept = matching && query ? rows.filter((row) => matches(row, layer, query)) : rows;
    // who searches for the layer's path wants to see it
    const whole = Boolean(query) && segment.layer !== null && query.includes(pathOf(segment, layer).toLowerCase());
    const { cells, widths } = columns(kept, segment, layer, whole);
    const lines = kept.map((row, at) => lineOf(row, cells[at], widths, layer, query, sources));
    return element("div", { class: "code", tabindex: "0" }, ...lines);
  }

  const lowered = new Map();
  function matches(row, layer, query) {
    if (!lowered.has(row)) lowered.set(row, `${row[NAME]}: ${row[TYPE]} = ${complete(row)}`.toLowerCase());
    return fill(lowered.get(row), layer).includes(query);
  }

  function fold(title, note, open, body) {
    const summary = element("summary", {}, element("span", { class: "name" }, title));
    if (note) summary.append(element("span", { class: "muted" }, note));
    const inside = element("div", { class: "body" });
    const made = element("details", { class: "fold" }, summary, inside);
    const render = () => {
      if (made.open && !inside.hasChildNodes()) inside.append(...body());
    };
    made.addEventListener("toggle", render);
    made.open = open;
    render();
    return made;
  }

  const rowsOf = (segment, kind) => data.texts[segment.text][kind].map((index) => data.rows[index]);

  // -- program ---------------------------------------------------------------------------------------------------
  const program = { stage: stages.length - 1, query: "" };

  function countMatches(segment, query) {
    let found = 0;
    for (const kind of [0, 1]) for (const row of rowsOf(segment, kind)) found += matches(row, segment.layer, query);
    return found;
  }

  function layerBody(segment, options) {
    const [weights, operators] = [rowsOf(segment, 0), rowsOf(segment, 1)];
    const found = [];
    const hit = options.query && weights.some((row) => matches(row, segment.layer, options.query));
    if (weights.length && (hit || !options.query || !options.matching)) {
      const list = element("details", { class: "plain" }, element("summary", {}, plural(weights.length, "weight")));
      const render = () => {
        if (list.open && list.children.length === 1) list.append(codeOf(weights, segment, segment.layer, options));
      };
      list.addEventListener("toggle", render);
      list.open = Boolean(hit);
      render();
      found.push(list);
    }
    found.push(codeOf(operators, segment, segment.layer, options));
    return found;
  }

  function layersFold(stage, members, counts, open, options) {
    const best = Math.max(0, members.findIndex((segment) => counts && counts.get(segment) > 0));
    const first = members[0];
    const notes = [];
    if (members.length > 1) notes.push(`${span(members.slice(1).map((s) => s.layer))} identical`);
    notes.push(plural(rowsOf(first, 1).length, "operator"));
    if (counts) {
      const inAll = members.reduce((sum, segment) => sum + counts.get(segment), 0);
      if (inAll) notes.push(`${plural(inAll, "match").replace(/s$/, "es")}`);
    }
    return fold(titleOf(stage, first), notes.join(" · "), open, () => {
      if (members.length === 1) return layerBody(first, options);
      const place = element("div", {});
      const choice = element("select", {
        "aria-label": "layer",
        onchange: () => place.replaceChildren(...layerBody(members[choice.selectedIndex], options)),
      });
      members.forEach((s, at) => {
        const found = counts && counts.get(s) ? `  (${counts.get(s)})` : "";
        choice.append(element("option", { selected: at === best }, pathOf(s) + found));
      });
      place.append(...layerBody(members[best], options));
      return [element("p", { class: "which" }, "shown as ", choice), place];
    });
  }

  function largestBlock(stage) {
    return stage.blocks.reduce((a, b) => (b[1] * b[2] > a[1] * a[2] ? b : a), stage.blocks[0]);
  }

  function showProgram(openAll) {
    const stage = stages[program.stage];
    const query = program.query;
    const options = { query, sources: byId("sources").checked, matching: byId("matching").checked };
    const counts = query ? new Map(stage.segments.map((s) => [s, countMatches(s, query)])) : null;
    const inputRows = stage.inputs.map((index) => data.rows[index]);
    const inputHits = query ? inputRows.filter((row) => matches(row, null, query)).length : 0;
    const place = byId("lines");
    const nowhere = { layer: null, prefix: "" };
    const content = [];
    if (!query || inputHits || !options.matching) {
      const open = openAll ?? Boolean(inputHits);
      content.push(fold("inputs", plural(inputRows.length, "value"), open, () => [codeOf(inputRows, nowhere, null, options)]));
    }
    const typical = largestBlock(stage);
    let places = 0;
    for (const block of stage.blocks) {
      const [start, period, times] = block;
      const groups = [];
      for (let at = 0; at < period; at++) {
        const members = [];
        for (let turn = 0; turn < times; turn++) members.push(stage.segments[start + at + turn * period]);
        const hits = counts ? members.reduce((sum, segment) => sum + counts.get(segment), 0) : 0;
        if (counts && hits) places += members.filter((segment) => counts.get(segment)).length;
        if (counts && !hits && options.matching) continue;
        const open = openAll ?? (counts ? hits > 0 : block === typical && at === 0);
        groups.push(layersFold(stage, members, counts, open, options));
      }
      if (period > 1 && groups.length) {
        const inside = stage.segments.slice(start, start + period).map((s) => s.layer);
        const rest = stage.segments.slice(start + period, start + period * times).map((s) => s.layer);
        const note = `repeat as ${span(rest)}, ${period} at a time`;
        content.push(fold(span(inside), note, openAll ?? (Boolean(counts) || block === typical), () => groups));
      } else content.push(...groups);
    }
    if (!query) content.push(element("div", { class: "code free" }, `return ${stage.output}`));
    place.replaceChildren(...content);
    if (query) {
      const inAll = [...counts.values()].reduce((sum, count) => sum + count, 0) + inputHits;
      const layers = places ? ` in ${plural(places, "place")}` : "";
      byId("found").textContent = inAll ? `${plural(inAll, "line")}${layers}` : "no line matches";
    } else {
      byId("found").textContent = `${plural(stage.operators, "operator")} after ${stage.name}`;
    }
  }

  function later(run) {
    let timer = 0;
    return () => {
      clearTimeout(timer);
      timer = setTimeout(run, 120);
    };
  }

  byId("stage").addEventListener("change", (event) => {
    program.stage = Number(event.target.value);
    showProgram();
  });
  byId("search").addEventListener("input", later(() => {
    program.query = byId("search").value.trim().toLowerCase();
    showProgram();
  }));
  for (const id of ["matching", "sources"]) byId(id).addEventListener("change", () => showProgram());
  byId("open-all").addEventListener("click", () => showProgram(true));
  byId("close-all").addEventListener("click", () => showProgram(false));
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName || "");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      byId("search").focus();
    }
  });

  // -- difference ------------------------------------------------------------------------------------------------
  // The best alignment of two lists: [index or -1, index or -1]. worth(a, b) is 0 where they must not stand together.
  // Equal ends are cut off first; the rest is the usual table, or (where that would be too large) unaligned.
  function align(one, other, worth) {
    const pairs = [];
    let start = 0;
    while (start < one.length && start < other.length && worth(one[start], other[start]) === 4) {
      pairs.push([start, start]);
      start++;
    }
    let [endOne, endOther] = [one.length, other.length];
    const tail = [];
    while (endOne > start && endOther > start && worth(one[endOne - 1], other[endOther - 1]) === 4) {
      tail.push([--endOne, --endOther]);
    }
    const [height, width] = [endOne - start, endOther - start];
    if (height * width > 6e6) {
      for (let at = start; at < endOne; at++) pairs.push([at, -1]);
      for (let at = start; at < endOther; at++) pairs.push([-1, at]);
      return [...pairs, ...tail.reverse()];
    }
    const best = new Uint32Array((height + 1) * (width + 1));
    const cell = (i, j) => i * (width + 1) + j;
    for (let i = height - 1; i >= 0; i--) {
      for (let j = width - 1; j >= 0; j--) {
        const both = worth(one[start + i], other[start + j]);
        best[cell(i, j)] = Math.max(best[cell(i + 1, j)], best[cell(i, j + 1)], both && both + best[cell(i + 1, j + 1)]);
      }
    }
    let [i, j] = [0, 0];
    while (i < height || j < width) {
      const both = i < height && j < width ? worth(one[start + i], other[start + j]) : 0;
      if (both && best[cell(i, j)] === both + best[cell(i + 1, j + 1)]) pairs.push([start + i++, start + j++]);
      else if (i < height && (j === width || best[cell(i, j)] === best[cell(i + 1, j)])) pairs.push([start + i++, -1]);
      else pairs.push([-1, start + j++]);
    }
    return [...pairs, ...tail.reverse()];
  }

  // Provenance is no part of what is compared: a pass that only touched a line did not change it.
  const compared = (row) => [row[NAME], row[TYPE], row[EXPRESSION], row[COMPLETE]].join("\u001f");

  function lineWorth(a, b) {
    if (a === b || compared(a) === compared(b)) return 4;
    return a[NAME] === b[NAME] ? 2 : 0;
  }

  function keyed(stage) {
    const seen = new Map();
    return stage.segments.map((segment) => {
      const base = segment.layer === null ? titleOf(stage, segment) : pathOf(segment);
      seen.set(base, (seen.get(base) || 0) + 1);
      return { key: `${base} ${seen.get(base)}`, segment };
    });
  }

  // The words of one line, those that the other line does not have in <b>.
  function changedWords(text, other) {
    const split = (line) => line.match(/[\w.]+|\s+|./g) || [];
    const [words, others] = [split(text), split(other)];
    const parts = [];
    for (const [i, j] of align(words, others, (a, b) => (a === b ? 4 : 0))) {
      if (i < 0) continue;
      const last = parts[parts.length - 1];
      if (last && last.same === j >= 0) last.text += words[i];
      else parts.push({ same: j >= 0, text: words[i] });
    }
    return parts.map((part) => (part.same ? part.text : element("b", {}, part.text)));
  }

  function sideLine(sign, row, segment, other, otherSegment) {
    const text = [NAME, TYPE, EXPRESSION].map((field) => shown(row[field], segment, segment.layer));
    const line = `${text[0]}: ${text[1]} = ${text[2]}`;
    let content = [line];
    if (other) {
      const pair = [NAME, TYPE, EXPRESSION].map((field) => shown(other[field], otherSegment, otherSegment.layer));
      content = changedWords(line, `${pair[0]}: ${pair[1]} = ${pair[2]}`);
    }
    const kind = sign === "−" ? " removed" : sign === "+" ? " added" : "";
    return element("div", { class: `line${kind}`, title: detail(row, segment.layer) || undefined }, `${sign} `, ...content);
  }

  function changesOf(one, other) {
    const before = one ? [...rowsOf(one, 0), ...rowsOf(one, 1)] : [];
    const after = other ? [...rowsOf(other, 0), ...rowsOf(other, 1)] : [];
    const cells = align(before, after, lineWorth).map(([i, j]) => {
      const [left, right] = [before[i], after[j]];
      return { left, right, same: i >= 0 && j >= 0 && lineWorth(left, right) === 4 };
    });
    return cells;
  }

  const cachedCounts = new Map();
  function countsOf(one, other) {
    const key = `${one ? one.text : ""}:${other ? other.text : ""}`;
    if (!cachedCounts.has(key)) {
      const cells = changesOf(one, other).filter((cell) => !cell.same);
      cachedCounts.set(key, [cells.filter((c) => c.left).length, cells.filter((c) => c.right).length]);
    }
    return cachedCounts.get(key);
  }

  function diffBody(one, other, names, everything) {
    const cells = changesOf(one, other);
    const near = cells.map((_, at) => everything || cells.slice(Math.max(0, at - 2), at + 3).some((c) => !c.same));
    const [left, right] = names.map((name) => element("div", { class: "code", tabindex: "0" }, element("div", { class: "line head" }, name)));
    const unified = element("div", { class: "code unified", tabindex: "0" });
    let skipped = 0;
    const flush = () => {
      if (!skipped) return;
      const text = `  … ${skipped} unchanged`;
      for (const place of [left, right, unified]) place.append(element("div", { class: "line skipped" }, text));
      skipped = 0;
    };
    cells.forEach(({ left: a, right: b, same }, at) => {
      if (!near[at]) {
        skipped++;
        return;
      }
      flush();
      left.append(a ? sideLine(same ? " " : "−", a, one, same ? null : b, other) : element("div", { class: "line" }, " "));
      right.append(b ? sideLine(same ? " " : "+", b, other, same ? null : a, one) : element("div", { class: "line" }, " "));
      if (a) unified.append(sideLine(same ? " " : "−", a, one, same ? null : b, other));
      if (b && !same) unified.append(sideLine("+", b, other, a, one));
    });
    flush();
    for (const [from, to] of [[left, right], [right, left]]) {
      from.addEventListener("scroll", () => {
        if (Math.abs(to.scrollLeft - from.scrollLeft) > 1) to.scrollLeft = from.scrollLeft;
      }, { passive: true });
    }
    return [element("div", { class: "sides" }, left, right), unified];
  }

  // Consecutive layers that change from one text to another in the same way are one entry.
  function diffEntries(before, after) {
    const [one, other] = [keyed(before), keyed(after)];
    const pairs = align(one, other, (a, b) => (a.key === b.key ? 4 : 0));
    const entries = [];
    for (const [i, j] of pairs) {
      const [a, b] = [i >= 0 ? one[i].segment : null, j >= 0 ? other[j].segment : null];
      const last = entries[entries.length - 1];
      const layer = (a || b).layer;
      const alike = last && layer !== null && (last.a ? last.a.text : -1) === (a ? a.text : -1)
        && (last.b ? last.b.text : -1) === (b ? b.text : -1);
      if (alike) last.layers.push(layer);
      else entries.push({ a, b, layers: layer === null ? [] : [layer] });
    }
    return foldPeriods(entries);
  }

  // Layers of several kinds in turn: entries with the same change as an earlier one are listed with it.
  function foldPeriods(entries) {
    const kept = new Map();
    const result = [];
    for (const entry of entries) {
      const key = entry.layers.length ? `${entry.a ? entry.a.text : ""}:${entry.b ? entry.b.text : ""}` : null;
      if (key && kept.has(key)) kept.get(key).layers.push(...entry.layers);
      else {
        result.push(entry);
        if (key) kept.set(key, entry);
      }
    }
    return result;
  }

  function ranges(numbers) {
    const parts = [];
    for (const n of numbers) {
      const last = parts[parts.length - 1];
      if (last && n === last[1] + 1) last[1] = n;
      else parts.push([n, n]);
    }
    const texts = parts.slice(0, 6).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
    return texts.join(", ") + (parts.length > 6 ? ", …" : "");
  }

  function showDiff() {
    const [before, after] = [stages[Number(byId("from").value)], stages[Number(byId("to").value)]];
    const everything = byId("whole-diff").checked;
    const content = [];
    let opened = 0;
    let [removed, added] = [0, 0];
    const changedInputs = inputsDiff(before, after);
    if (changedInputs) content.push(changedInputs);
    for (const { a, b, layers } of diffEntries(before, after)) {
      const counts = countsOf(a, b);
      const many = Math.max(1, layers.length);
      removed += counts[0] * many;
      added += counts[1] * many;
      const where = titleOf(b ? after : before, b || a);
      const same = !counts[0] && !counts[1];
      const others = layers.length > 1 ? `and ${plural(layers.length - 1, "layer")} more (${ranges(layers)}) · ` : "";
      const note = others + (same ? "unchanged" : `−${counts[0]} +${counts[1]} lines`);
      content.push(fold(where, note, !same && opened++ < 2, () => diffBody(a, b, [before.name, after.name], everything || same)));
    }
    byId("diff-status").textContent = removed || added || changedInputs
      ? `−${removed.toLocaleString("en")} +${added.toLocaleString("en")} lines of weights and operators`
      : `${after.name} leaves the program of ${before.name} as it is`;
    byId("diff").replaceChildren(...content);
  }

  function inputsDiff(before, after) {
    if (String(before.inputs) === String(after.inputs)) return null;
    const rows = [before, after].map((stage) => stage.inputs.map((index) => data.rows[index]));
    const nowhere = { layer: null, prefix: "" };
    const code = element("div", { class: "code" });
    for (const [i, j] of align(rows[0], rows[1], lineWorth)) {
      if (i >= 0 && j >= 0 && lineWorth(rows[0][i], rows[1][j]) === 4) continue;
      const pair = i >= 0 && j >= 0;
      if (i >= 0) code.append(sideLine("−", rows[0][i], nowhere, pair ? rows[1][j] : null, nowhere));
      if (j >= 0) code.append(sideLine("+", rows[1][j], nowhere, pair ? rows[0][i] : null, nowhere));
    }
    return code.children.length ? fold("inputs", plural(code.children.length, "changed line"), false, () => [code]) : null;
  }

  for (const id of ["from", "to", "whole-diff"]) byId(id).addEventListener("change", showDiff);
  for (const button of document.querySelectorAll("[data-pass]")) {
    button.addEventListener("click", () => {
      const at = stages.findIndex((stage) => stage.name === button.dataset.pass);
      if (at < 0) return;
      byId("from").value = String(Math.max(0, at - 1));
      byId("to").value = String(at);
      showDiff();
      byId("difference").scrollIntoView();
      byId("from").focus({ preventScroll: true });
    });
  }

  // -- graph -----------------------------------------------------------------------------------------------------
  const BOX = { width: 196, height: 40, gap: 22, thread: 14, between: 34 };

  // The values of a layer and what they use; what comes from other layers, and (on request) weights and inputs.
  function graphOf(stage, segment, withInputs) {
    const nodes = new Map();
    const edges = [];
    const own = rowsOf(segment, 1);
    const weights = new Map(rowsOf(segment, 0).map((row) => [fill(row[NAME], segment.layer), row]));
    const inputs = new Map(stage.inputs.map((index) => [data.rows[index][NAME], data.rows[index]]));
    for (const row of own) {
      const name = fill(row[NAME], segment.layer);
      nodes.set(name, { name, row, kind: "own", label: row[EXPRESSION].split("(")[0] });
    }
    for (const row of own) {
      const target = nodes.get(fill(row[NAME], segment.layer));
      for (const name of row[USES] ? fill(row[USES], segment.layer).split("\n") : []) {
        const fixed = weights.get(name) || inputs.get(name);
        if (fixed && !withInputs) continue;
        // a weight or an input is drawn again for every user: its edges would cross everything
        const key = fixed ? `${name} → ${target.name}` : name;
        if (!nodes.has(key)) {
          const label = weights.has(name) ? "weight" : inputs.has(name) ? "input" : "from outside";
          nodes.set(key, { name, row: fixed || null, kind: "outside", label });
        }
        edges.push([nodes.get(key), target]);
      }
    }
    for (const node of [...nodes.values()].filter((node) => node.kind === "own")) {
      const users = outsideUsers(stage).get(node.name);
      const elsewhere = users ? [...users].filter((index) => index !== segment.index) : [];
      if (elsewhere.length) {
        const where = elsewhere.slice(0, 2).map((index) => (index < 0 ? "the result" : titleOf(stage, stage.segments[index])));
        const more = elsewhere.length > 2 ? " …" : "";
        const user = { name: where.join(", ") + more, row: null, kind: "outside", label: "used by" };
        nodes.set(`used ${node.name}`, user);
        edges.push([node, user]);
      }
    }
    return { nodes: [...nodes.values()], edges };
  }

  const usersOfStage = new Map();
  function outsideUsers(stage) {
    if (!usersOfStage.has(stage)) {
      const users = new Map([[stage.output, new Set([-1])]]);
      for (const segment of stage.segments) {
        for (const row of rowsOf(segment, 1)) {
          for (const name of row[USES] ? fill(row[USES], segment.layer).split("\n") : []) {
            if (!users.has(name)) users.set(name, new Set());
            users.get(name).add(segment.index);
          }
        }
      }
      usersOfStage.set(stage, users);
    }
    return usersOfStage.get(stage);
  }

  // Layered drawing: levels by longest path, long edges through points of their own, order by the mean of neighbours,
  // then positions as near to the neighbours as the order allows.
  function layout({ nodes, edges }) {
    for (const node of nodes) Object.assign(node, { level: 0, up: [], down: [] });
    for (const [from, to] of edges) from.down.push(to);
    const sorted = [];
    const state = new Map();
    const visit = (node) => {
      if (state.has(node)) return;
      state.set(node, 1);
      node.down.forEach(visit);
      sorted.push(node);
    };
    nodes.forEach(visit);
    sorted.reverse();
    for (const node of sorted) for (const to of node.down) to.level = Math.max(to.level, node.level + 1);
    // What has no more inputs than users stands just above its users: its edges are no longer for it.
    const inputs = new Map();
    for (const [, to] of edges) inputs.set(to, (inputs.get(to) || 0) + 1);
    for (const node of [...sorted].reverse()) {
      if (node.down.length && (inputs.get(node) || 0) <= node.down.length) {
        node.level = Math.min(...node.down.map((to) => to.level)) - 1;
      }
    }
    for (const node of sorted) node.down = [];
    const levels = [];
    const put = (node) => (levels[node.level] = levels[node.level] || []).push(node);
    nodes.forEach((node) => put(Object.assign(node, { width: BOX.width })));
    const link = (from, to) => {
      from.down.push(to);
      to.up.push(from);
    };
    const paths = edges.map(([from, to]) => {
      const path = [from];
      for (let level = from.level + 1; level < to.level; level++) {
        const point = { level, up: [], down: [], width: BOX.thread, kind: "point" };
        put(point);
        link(path[path.length - 1], point);
        path.push(point);
      }
      link(path[path.length - 1], to);
      return [...path, to];
    });
    const place = () => levels.forEach((level) => level.forEach((node, at) => (node.order = at)));
    place();
    // A long edge is kept straight: two of its points pull each other more than anything else does.
    const pull = (a, b) => (a.kind === "point" && b.kind === "point" ? 24 : 1);
    const mean = (node, list, key) => {
      const weights = list.map((other) => pull(node, other));
      const sum = weights.reduce((total, weight) => total + weight, 0);
      return sum ? list.reduce((total, other, at) => total + weights[at] * other[key], 0) / sum : node[key];
    };
    for (let sweep = 0; sweep < 12; sweep++) {
      const side = sweep % 2 ? "down" : "up";
      for (const level of sweep % 2 ? [...levels].reverse() : levels) {
        level.forEach((node) => (node.wish = mean(node, node[side], "order")));
        level.sort((a, b) => a.wish - b.wish || a.order - b.order);
        level.forEach((node, at) => (node.order = at));
      }
    }
    for (const level of levels) {
      let x = 0;
      for (const node of level) {
        node.x = x + node.width / 2;
        x += node.width + BOX.gap;
      }
      level.forEach((node) => (node.x -= x / 2));
    }
    for (let sweep = 0; sweep < 40; sweep++) {
      for (const level of sweep % 2 ? [...levels].reverse() : levels) {
        const near = sweep < 16 ? (sweep % 2 ? "down" : "up") : null;
        level.forEach((node) => (node.wish = mean(node, near ? node[near] : [...node.up, ...node.down], "x")));
        const least = (a, b) => (a.width + b.width) / 2 + BOX.gap;
        const right = level.map((node) => node.wish);
        const left = level.map((node) => node.wish);
        for (let at = 1; at < level.length; at++) right[at] = Math.max(right[at], right[at - 1] + least(level[at - 1], level[at]));
        for (let at = level.length - 2; at >= 0; at--) left[at] = Math.min(left[at], left[at + 1] - least(level[at], level[at + 1]));
        level.forEach((node, at) => (node.x = (right[at] + left[at]) / 2));
      }
    }
    const all = levels.flat();
    for (const path of paths) straighten(levels, path.filter((node) => node.kind === "point"));
    const leftmost = Math.min(...all.map((node) => node.x - node.width / 2)) - 16;
    all.forEach((node) => {
      node.x -= leftmost;
      node.y = 16 + node.level * (BOX.height + BOX.between);
    });
    const width = Math.max(...all.map((node) => node.x + node.width / 2)) + 16;
    return { paths, width, height: levels.length * (BOX.height + BOX.between) };
  }

  // All points of a long edge below each other, where their neighbours leave room for it.
  function straighten(levels, points) {
    const room = points.map((point) => {
      const level = levels[point.level];
      const [before, after] = [level[point.order - 1], level[point.order + 1]];
      const gap = (other) => (other.width + point.width) / 2 + BOX.gap / 2;
      return [before ? before.x + gap(before) : -Infinity, after ? after.x - gap(after) : Infinity];
    });
    const least = Math.max(...room.map(([low]) => low));
    const most = Math.min(...room.map(([, high]) => high));
    if (!points.length || least > most) return;
    const middle = points.reduce((sum, point) => sum + point.x, 0) / points.length;
    for (const point of points) point.x = Math.min(most, Math.max(least, middle));
  }

  function placementOf(row) {
    const found = row && /\] (R|S|P)\b/.exec(row[TYPE]);
    return found ? found[1] : "none";
  }

  const short = (text, length) => (text.length > length ? `…${text.slice(1 - length)}` : text);

  function showGraph() {
    const stage = stages[Number(byId("graph-stage").value)];
    const segment = stage.segments[Number(byId("graph-layer").value)];
    const graph = graphOf(stage, segment, byId("graph-inputs").checked);
    const { paths, width, height } = layout(graph);
    const svg = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group" });
    const arrow = drawn("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" },
      drawn("path", { d: "M0 0L8 4L0 8z" }));
    svg.append(drawn("defs", {}, arrow));
    const lines = paths.map((path) => {
      let d = `M${path[0].x} ${path[0].y + BOX.height}`;
      path.slice(1).forEach((node, at) => {
        const fromY = path[at].y + BOX.height;
        const bend = (fromY + node.y) / 2;
        d += ` C${path[at].x} ${bend} ${node.x} ${bend} ${node.x} ${node.y}`;
        if (node.kind === "point") d += ` V${node.y + BOX.height}`;
      });
      const line = drawn("path", { class: "edge", d, "marker-end": "url(#arrow)" });
      svg.append(line);
      return { line, ends: [path[0], path[path.length - 1]] };
    });
    let before = null;
    const choose = (node, box) => {
      if (before) before.classList.remove("chosen");
      before = box;
      box.classList.add("chosen");
      lines.forEach(({ line, ends }) => line.classList.toggle("on", ends.includes(node)));
      byId("chosen").replaceChildren(...chosenLines(node, segment));
    };
    for (const node of graph.nodes) {
      const placement = placementOf(node.row);
      const isCollective = node.kind === "own" && (COLLECTIVES.has(node.label) || node.label.startsWith("all_reduce_"));
      const kinds = ["node", placement, node.kind, isCollective ? "collective" : ""].filter(Boolean).join(" ");
      const own = node.kind === "own";
      const name = own ? shown(node.row[NAME], segment, segment.layer) : node.name;
      const said = `${node.label} ${name}${placement === "none" ? "" : `, ${placement}`}`;
      const box = drawn("g", {
        class: kinds, tabindex: "0", role: "button", "aria-label": said, "data-name": node.name,
        transform: `translate(${node.x - BOX.width / 2} ${node.y})`,
      });
      const [w, h] = [BOX.width, BOX.height];
      if (isCollective) box.append(drawn("path", { class: "shape", d: `M14 0H${w - 14}L${w} ${h / 2}L${w - 14} ${h}H14L0 ${h / 2}z` }));
      else box.append(drawn("rect", { class: "shape", width: w, height: h, rx: own ? 4 : 14 }));
      if (own && !isCollective) box.append(drawn("rect", { class: "band", width: 7, height: h, rx: 2 }));
      const mark = own && placement !== "none" ? /\] ([RSP](?:\([^)]*\))?)/.exec(node.row[TYPE])[1] : "";
      const inset = own && !isCollective ? 15 : 20;
      box.append(drawn("text", { x: inset, y: 16 }, own ? short(node.label, 18) : node.label));
      box.append(drawn("text", { class: "small", x: inset, y: 31 }, short(name, 26)));
      if (mark) box.append(drawn("text", { class: "small", x: w - (isCollective ? 18 : 8), y: 15, "text-anchor": "end" }, mark));
      box.addEventListener("click", () => choose(node, box));
      box.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        choose(node, box);
      });
      svg.append(box);
    }
    byId("drawing").replaceChildren(svg);
    const top = graph.nodes.filter((node) => node.level < 3);
    const centre = top.reduce((sum, node) => sum + node.x, 0) / Math.max(1, top.length);
    byId("drawing").scrollTo(Math.max(0, centre - byId("drawing").clientWidth / 2), 0);
    byId("chosen").replaceChildren(element("span", { class: "muted" }, "choose a box to see its line"));
  }

  function chosenLines(node, segment) {
    if (!node.row) return [element("div", { class: "line" }, `${node.label} ${node.name}`)];
    const row = node.row.map((text) => fill(text, segment.layer));
    const lines = [element("div", { class: "line" }, `${row[NAME]}: `, element("span", { class: "t" }, row[TYPE]), ` = ${row[EXPRESSION]}`)];
    const more = detail(node.row, segment.layer);
    if (more) lines.push(element("div", { class: "line c" }, `# ${more}`));
    return lines;
  }

  function listLayers() {
    const stage = stages[Number(byId("graph-stage").value)];
    const choice = byId("graph-layer");
    const wanted = choice.selectedOptions.length ? choice.selectedOptions[0].textContent : null;
    const segments = stage.segments;
    choice.replaceChildren(...segments.map((s) => element("option", { value: String(s.index) }, titleOf(stage, s))));
    const kept = wanted === null ? -1 : segments.findIndex((s) => titleOf(stage, s) === wanted);
    choice.value = String(kept >= 0 ? kept : largestBlock(stage)[0]);
    showGraph();
  }

  byId("graph-stage").addEventListener("change", listLayers);
  for (const id of ["graph-layer", "graph-inputs"]) byId(id).addEventListener("change", showGraph);

  // -- weights ---------------------------------------------------------------------------------------------------
  function weightGroups(query, together) {
    const { kinds, items } = data.weights;
    const groups = new Map();
    let [count, bytes] = [0, 0];
    items.forEach(([kind, layer], at) => {
      const about = kinds[kind];
      const text = fill(`${about.name}\n${about.shape}\n${about.global}\n${about.dtype}\n${about.placement}\n${about.held}\n${about.recipe}`, layer);
      if (query && !text.toLowerCase().includes(query)) return;
      count++;
      bytes += about.bytes;
      const key = together ? kind : `#${at}`;
      if (!groups.has(key)) groups.set(key, { about, layers: [] });
      groups.get(key).layers.push(layer);
    });
    return { groups: [...groups.values()], count, bytes };
  }

  function bytesText(count) {
    for (const unit of ["B", "KB", "MB", "GB"]) {
      if (count < 1000 || unit === "GB") return `${unit === "B" ? count : count.toFixed(2)} ${unit}`;
      count /= 1000;
    }
    return "";
  }

  function nameOf(about, layers) {
    const numbers = layers.length > 1 ? `{${ranges(layers)}}` : null;
    return numbers ? about.name.replace(MARKS, numbers) : fill(about.name, layers[0]);
  }

  function readsOf(about, layer) {
    if (about.reads.length === 1 && data.ranks > 1) return [`every rank reads ${fill(about.reads[0], layer)}`];
    return about.reads.map((text, rank) => {
      const owned = about.owns.length ? `   ${about.owns[rank]}` : "";
      return `rank ${rank}: ${fill(text, layer)}${owned}`;
    });
  }

  function weightRow({ about, layers }) {
    const button = element("button", { type: "button", "aria-expanded": "false" }, nameOf(about, layers));
    const many = layers.length > 1 ? `${layers.length} × ${bytesText(about.bytes)}` : bytesText(about.bytes);
    const global = about.global.replace(/ .*$/, "") === `${about.dtype}${about.shape}` ? "" : about.global;
    const recipe = layers.length > 1 ? about.recipe.replace(MARKS, "n") : fill(about.recipe, layers[0]);
    const row = element("tr", {},
      element("td", { class: "name" }, button), element("td", { title: global }, about.shape), element("td", {}, about.dtype),
      element("td", {}, about.placement), element("td", { class: "num", title: `${about.bytes.toLocaleString("en")} bytes each` }, many),
      element("td", { class: "words" }, about.held), element("td", {}, recipe));
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      if (open) {
        row.nextSibling.remove();
        return;
      }
      const lines = [
        `${fill(about.name, layers[0])}: ${about.global} = ${fill(about.recipe, layers[0])}`,
        ...readsOf(about, layers[0]),
        `${about.bytes.toLocaleString("en")} bytes on each rank`,
      ].map((text) => element("div", {}, text));
      row.after(element("tr", {}, element("td", { colspan: "7" }, element("div", { class: "ranks" }, ...lines))));
    });
    return row;
  }

  const MOST_ROWS = 600;
  function showWeights() {
    const query = byId("weight-filter").value.trim().toLowerCase();
    const { groups, count, bytes } = weightGroups(query, byId("weight-fold").checked);
    byId("weight-rows").replaceChildren(...groups.slice(0, MOST_ROWS).map(weightRow));
    const cut = groups.length > MOST_ROWS ? `; the first ${MOST_ROWS} rows are shown` : "";
    byId("weight-status").textContent = `${plural(count, "weight")}, ${bytesText(bytes)} on each rank${cut}`;
  }

  byId("weight-filter").addEventListener("input", later(showWeights));
  byId("weight-fold").addEventListener("change", showWeights);

  // -- start -----------------------------------------------------------------------------------------------------
  // A browser that restores form fields may have other values than the page says.
  program.stage = Number(byId("stage").value);
  program.query = byId("search").value.trim().toLowerCase();
  showProgram();
  listLayers();
  showWeights();
  const named = stages.findIndex((stage) => stage.name === "shard_tensor_parallel");
  if (named > 0) {
    byId("from").value = String(named - 1);
    byId("to").value = String(named);
  }
  showDiff();
})();
