// Spark's builder of a Python scan, which also takes the list of columns that the query needs.
//
// Filters are pushed to Python by the inherited code, before Spark prunes columns.  Python therefore
// plans for all columns; which of them are built is decided here alone.
package pk.reader;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonScanBuilder;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** Builds a {@link ColumnarScan} around the scan that Spark itself builds. */
public final class ColumnarScanBuilder extends PythonScanBuilder
    implements SupportsPushDownRequiredColumns {
  private final StructType full;
  private StructType required;

  public ColumnarScanBuilder(
      PythonDataSourceV2 source, String name, StructType full, CaseInsensitiveStringMap options) {
    super(source, name, full, options);
    this.full = full;
    this.required = full;
  }

  /** Keeps whole columns: Spark may ask for a part of `headers`, and gets all of it. */
  @Override
  public void pruneColumns(StructType wanted) {
    List<StructField> kept = new ArrayList<>();
    for (StructField field : full.fields()) {
      for (String name : wanted.fieldNames()) {
        if (name.equals(field.name())) {
          kept.add(field);
        }
      }
    }
    required = new StructType(kept.toArray(new StructField[0]));
  }

  @Override
  public Scan build() {
    return new ColumnarScan(super.build(), full, required);
  }
}
